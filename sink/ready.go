package sink

import (
	"context"
	"errors"
	"fmt"
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
	if err != nil || s.durable.none() {
		return unreachable(err)
	}
	err = s.each(ctx, func(ctx context.Context, c *redis.Client) error { return s.durabilityExists(ctx, c) })
	return unreachable(err)
}

// each calls fn for the server, or for all masters of a cluster concurrently, and returns the first error. A node of a
// cluster may use at most half of the remaining time.
func (s *Sink) each(ctx context.Context, fn func(ctx context.Context, c *redis.Client) error) error {
	switch c := s.client.(type) {
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
	return fmt.Errorf("a client of type %T has no servers", s.client)
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
	err := s.client.EvalSha(ctx, strings.Repeat("0", 40), nil).Err()
	if Class(err) == "noperm" {
		return err
	}
	for i, stream := range append([]string{"{posthaste}:probe"}, streams...) {
		err := s.client.XAdd(ctx, &redis.XAddArgs{
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
	many, cluster := s.client.(*redis.ClusterClient)
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
	switch class {
	case "oom":
		return "raise maxmemory, or shorten the streams"
	case "readonly":
		return "point POSTHASTE_REDIS_URL at the primary"
	case "misconf":
		return "Redis cannot write to its disk: look at its log and disk"
	case "busy":
		return "a script runs there without end: SCRIPT KILL, or FUNCTION KILL, ends it"
	case "noreplicas":
		return "bring the replicas back, or lower min-replicas-to-write"
	case "noauth":
		return redisurl.AuthRemedy
	case "noperm":
		return "give the user the commands and keys it needs by ACL SETUSER: see docs/operations.md"
	case "tls":
		return "check the certificates: --redis-ca, --redis-cert and --redis-key, and that of Redis"
	case classWrongType:
		return "rename or delete this key: it is not a stream"
	case "loading":
		return "wait until Redis has loaded its data"
	}
	return "check that Redis listens there, or set POSTHASTE_REDIS_URL"
}

func (s *Sink) durabilityExists(ctx context.Context, c *redis.Client) error {
	if s.durable.AOF {
		return aofExists(ctx, c)
	}
	info, err := infoOf(ctx, c, "replication")
	if err != nil || info == nil { // WAIT will count them
		return err
	}
	if n, _ := strconv.Atoi(info["connected_slaves"]); n < s.durable.Replicas {
		return &NotReadyError{
			Reason: "replicas",
			Err:    fmt.Errorf("durability %s is configured, and %d replicas are connected", s.durable, n),
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

func unsafeEviction(policy string) bool { return policy != "" && policy != "noeviction" }
