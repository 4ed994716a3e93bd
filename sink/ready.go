package sink

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
)

// NotReadyError names a condition that keeps events from being published or settled.
type NotReadyError struct {
	// Reason is "unreachable", "not_writable", "no_waitaof", "aof_off" or "replicas".
	Reason string
	// Remedy is a sentence with what an operator can do.
	Remedy string
	Err    error
}

func (e *NotReadyError) Error() string {
	s := "redis " + strings.ReplaceAll(e.Reason, "_", " ")
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s + " (" + e.Remedy + ")"
}

// Unwrap returns the cause.
func (e *NotReadyError) Unwrap() error { return e.Err }

// Ready returns nil if Redis is reachable, writable and has the configured durability; otherwise *NotReadyError. It
// writes nothing. In a cluster every master must be healthy, because each has streams.
func (s *Sink) Ready(ctx context.Context) error {
	err := s.each(ctx, func(ctx context.Context, c *redis.Client) error { return s.writable(ctx, c) })
	// Even if one node of a cluster is down, another one may have been replaced.
	if other := s.stays(ctx); err == nil && !errors.Is(other, errOther) {
		err = other
	}
	if err != nil || s.o.Durability.none() {
		return unreachable(err)
	}
	err = s.each(ctx, func(ctx context.Context, c *redis.Client) error { return s.durabilityExists(ctx, c) })
	return unreachable(err)
}

// each calls fn for the server, or for all masters of a cluster concurrently, and returns the first error. A node of a
// cluster may use at most half of the remaining time.
func (s *Sink) each(ctx context.Context, fn func(ctx context.Context, c *redis.Client) error) error {
	switch c := s.o.Client.(type) {
	case *redis.Client:
		return fn(ctx, c)
	case *redis.ClusterClient:
		return c.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error {
			ctx, cancel := half(ctx)
			defer cancel()
			err := fn(ctx, c)
			var not *NotReadyError
			switch {
			case err == nil:
			case errors.As(err, &not):
				not.Err = redisurl.Node{Addr: c.Options().Addr}.Named(not.Err)
			default:
				err = redisurl.Node{Addr: c.Options().Addr}.Named(err)
			}
			return err
		})
	}
	return fmt.Errorf("a client of type %T has no servers", s.o.Client)
}

// unreachable wraps an error that is not a NotReadyError in one.
func unreachable(err error) error {
	var not *NotReadyError
	if err == nil || errors.As(err, &not) {
		return err
	}
	return &NotReadyError{Reason: "unreachable", Remedy: Remedy(Class(err)), Err: err}
}

// writable checks one server.
func (s *Sink) writable(ctx context.Context, c *redis.Client) error {
	// This command may write and need memory, but its stream does not exist. (PING would answer MISCONF on a server
	// that is only read-only.)
	err := c.XAdd(ctx, &redis.XAddArgs{
		Stream: s.probeKey(ctx, c), NoMkStream: true, ID: "*", Values: []any{"probe", ""},
	}).Err()
	if errors.Is(err, errOther) {
		return nil // it answers; the relay will adopt again
	}
	if _, moved := redis.IsMovedError(err); moved { // another node has just taken the slot over
		return nil
	}
	// The user may be restricted to the streams and gates.
	if err != nil && !errors.Is(err, redis.Nil) && !redis.HasErrorPrefix(err, "NOPERM") {
		class, reason := Class(err), "not_writable"
		if class == "connection" || class == "timeout" || class == "canceled" || class == "noauth" {
			reason = "unreachable"
		}
		return &NotReadyError{Reason: reason, Remedy: Remedy(class), Err: err}
	}
	return nil
}

// Permitted returns the error with which Redis refuses, for lack of rights, what publishing to streams needs; nil if it
// refuses nothing. It writes nothing.
func (s *Sink) Permitted(ctx context.Context, streams []string) error {
	// Redis does not know this script, and no entry has the id 0-0. It checks the rights before.
	err := s.o.Client.EvalSha(ctx, strings.Repeat("0", 40), nil).Err()
	if Class(err) == "noperm" {
		return err
	}
	for i, stream := range append([]string{"{posthaste}:probe"}, streams...) {
		err := s.o.Client.XAdd(ctx, &redis.XAddArgs{
			Stream: stream, NoMkStream: true, ID: "0-0", Values: []any{"probe", ""},
		}).Err()
		// The user may be restricted to the streams and gates.
		if Class(err) == "noperm" && (i > 0 || strings.Contains(err.Error(), "'xadd'")) {
			return s.failed("add to", stream, err)
		}
	}
	return nil
}

// probeKey returns a key that is never created; in a cluster, one that c holds.
func (s *Sink) probeKey(ctx context.Context, c *redis.Client) string {
	key := "{posthaste}:probe"
	many, cluster := s.o.Client.(*redis.ClusterClient)
	for n := 0; cluster && n < probes; n++ {
		if node, err := many.MasterForKey(ctx, key); err != nil || node == c {
			break
		}
		key = "{posthaste" + strconv.Itoa(n) + "}:probe"
	}
	return key
}

// probes is how many keys are tried to find one that a node holds. A node of a cluster of a hundred equal nodes holds
// one of them.
const probes = 2000

// Remedy returns a short remedy for an error of a class.
func Remedy(class string) string {
	return cmp.Or(remedies[class], "check that Redis listens there, or set POSTHASTE_REDIS_URL")
}

var remedies = map[string]string{
	"oom":          "raise maxmemory, or shorten the streams",
	"readonly":     "point POSTHASTE_REDIS_URL at the primary",
	"misconf":      "Redis cannot write to its disk: look at its log and disk",
	"busy":         "a script runs there without end: SCRIPT KILL, or FUNCTION KILL, ends it",
	"noreplicas":   "bring the replicas back, or lower min-replicas-to-write",
	"noauth":       redisurl.AuthRemedy,
	"noperm":       "give the user the commands and keys it needs by ACL SETUSER: see docs/operations.md",
	"tls":          "check the certificates: --redis-ca, --redis-cert and --redis-key, and that of Redis",
	classWrongType: "rename or delete this key: it is not a stream",
	"loading":      "wait until Redis has loaded its data",
}

func (s *Sink) durabilityExists(ctx context.Context, c *redis.Client) error {
	if s.o.Durability.AOF {
		return aofExists(ctx, c)
	}
	info, err := infoOf(ctx, c, "replication")
	if err != nil || info == nil { // WAIT will count them
		return err
	}
	if n, _ := strconv.Atoi(info["connected_slaves"]); n < s.o.Durability.Replicas {
		return &NotReadyError{
			Reason: "replicas",
			Err:    fmt.Errorf("durability %s is configured, and %d replicas are connected", s.o.Durability, n),
			Remedy: "start the missing replicas, or set the durability to fewer replicas",
		}
	}
	return nil
}

func aofExists(ctx context.Context, c *redis.Client) error {
	commands, err := c.Do(ctx, "command", "info", "waitaof").Slice()
	if err != nil && !redisurl.Refused(err) {
		return err
	}
	if err == nil && (len(commands) == 0 || commands[0] == nil) {
		return &NotReadyError{
			Reason: "no_waitaof", Err: errors.New("durability aof needs WAITAOF, which this server does not have"),
			Remedy: "use Redis 7.2 or later, or Valkey, or set the durability to replicas=N or none",
		}
	}
	info, err := infoOf(ctx, c, "persistence")
	if err != nil || info == nil {
		return err
	}
	if info["aof_enabled"] != "1" {
		return &NotReadyError{
			Reason: "aof_off", Err: errors.New("durability aof is configured, and the server has no append-only file"),
			Remedy: "set appendonly yes",
		}
	}
	return nil
}

// infoOf returns the fields of sections of INFO, whose names differ, nil if that is refused.
func infoOf(ctx context.Context, c *redis.Client, sections ...string) (map[string]string, error) {
	info, err := redisurl.Info(ctx, c, sections...)
	if redisurl.Refused(err) {
		return nil, nil //nolint:nilnil // nothing is known
	}
	return info, err
}

// infos returns those of the server, or of all masters of a cluster, by address.
func (s *Sink) infos(ctx context.Context, sections ...string) (map[string]map[string]string, error) {
	var mu sync.Mutex
	all := make(map[string]map[string]string)
	err := s.each(ctx, func(ctx context.Context, c *redis.Client) error {
		info, err := infoOf(ctx, c, sections...)
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			all[c.Options().Addr] = info
		}
		return err
	})
	return all, unreachable(err)
}

// Unknown returns what the servers, or proxies in front of them, keep posthaste from knowing, a text for each cause;
// nil if it knows everything. Publishing does not need it.
func (s *Sink) Unknown(ctx context.Context) ([]string, error) {
	var mu sync.Mutex
	var all []string
	err := s.each(ctx, func(ctx context.Context, c *redis.Client) error {
		list, err := unknown(ctx, c)
		mu.Lock()
		defer mu.Unlock()
		for _, text := range list {
			if !slices.Contains(all, text) {
				all = append(all, text)
			}
		}
		return err
	})
	return all, err
}

func unknown(ctx context.Context, c *redis.Client) (list []string, err error) {
	info, err := infoOf(ctx, c, "memory")
	if err != nil {
		return nil, err
	}
	p, err := identify(ctx, c)
	if err != nil {
		return nil, err
	}
	switch {
	case info == nil && p == (instance{}):
		list = append(list, "Redis refuses INFO: its version, memory, eviction policy, persistence and identity are "+
			"unknown, and a restart is noticed by missing events only")
	case p == (instance{}):
		list = append(list, "Redis does not identify itself: a restart is noticed by missing events only")
	case info == nil:
		list = append(list, "Redis refuses a part of INFO: its memory, eviction policy and persistence are unknown")
	}
	if p != (instance{}) {
		v, err := compare(ctx, c, p)
		switch {
		case err != nil:
			return nil, err
		case v.history:
			list = append(list, "Redis has another identity on each connection: a restart is noticed by missing "+
				"events only")
		case v.run:
			list = append(list, "Redis has another run id on each connection: a restart is noticed by its replication "+
				"id")
		}
	}
	switch err := c.ConfigGet(ctx, "appendfsync").Err(); {
	case redisurl.Refused(err):
		list = append(list, "Redis refuses CONFIG GET: its size limits and appendfsync are unknown")
	case err != nil:
		return nil, err
	}
	return list, nil
}
