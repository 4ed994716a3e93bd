package sink

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
)

// NotReadyError names a condition that keeps events from being published or settled.
type NotReadyError struct {
	// Reason is "unreachable", "not_writable", "no_waitaof", "aof_off" or "replicas".
	Reason string
	// Remedy says in one sentence what an operator can do.
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

// probeKey is never created.
const probeKey = "{posthaste}:probe"

// Ready returns nil if Redis can be reached and written and has the durability asked for; else *NotReadyError. It
// writes nothing.
func (s *Sink) Ready(ctx context.Context) error {
	// A command that may write and may need memory, but finds nothing to do. (PING would answer MISCONF for a server
	// that is only read-only.)
	err := s.client.XAdd(ctx,
		&redis.XAddArgs{Stream: probeKey, NoMkStream: true, ID: "*", Values: []any{"probe", ""}}).Err()
	if errors.Is(err, errOther) {
		return nil // it answers; the relay is about to adopt anew
	}
	// A user may well be confined to the streams and gates.
	if err != nil && !errors.Is(err, redis.Nil) && !redis.HasErrorPrefix(err, "NOPERM") {
		class, reason := Class(err), "not_writable"
		if class == "connection" || class == "timeout" || class == "canceled" || class == "noauth" {
			reason = "unreachable"
		}
		return &NotReadyError{Reason: reason, Remedy: Remedy(class), Err: err}
	}
	if err := s.stays(ctx); err != nil && !errors.Is(err, errOther) {
		return &NotReadyError{Reason: "unreachable", Remedy: Remedy(Class(err)), Err: err}
	}
	return s.durabilityExists(ctx)
}

// Remedy says in a few words what helps against an error of a class.
func Remedy(class string) string {
	switch class {
	case "oom":
		return "raise maxmemory, or shorten the streams"
	case "readonly":
		return "point the Redis URL at the primary"
	case "misconf":
		return "Redis cannot write its snapshot: look at its log and disk"
	case "noreplicas":
		return "bring the replicas back, or lower min-replicas-to-write"
	case "noauth":
		return "check user and password in the Redis URL"
	case "noperm":
		return "grant the user the commands and keys it needs"
	case "tls":
		return "check the certificates: --redis-ca, --redis-cert and --redis-key, and that of Redis"
	case "loading":
		return "wait until Redis has loaded its data"
	}
	return "check that Redis runs and that the Redis URL is right"
}

func (s *Sink) durabilityExists(ctx context.Context) error {
	switch {
	case s.durable.AOF:
		return s.aofExists(ctx)
	case s.durable.Replicas > 0:
		info, err := s.info(ctx, "replication")
		if err != nil {
			return err
		}
		if n, _ := strconv.Atoi(info["connected_slaves"]); n < s.durable.Replicas {
			return &NotReadyError{
				Reason: "replicas", Err: fmt.Errorf("durability %s is asked for and %d are connected", s.durable, n),
				Remedy: "bring the replicas back, or ask for fewer",
			}
		}
	}
	return nil
}

func (s *Sink) aofExists(ctx context.Context) error {
	commands, err := s.client.Do(ctx, "command", "info", "waitaof").Slice()
	if err != nil {
		return &NotReadyError{Reason: "unreachable", Remedy: Remedy(Class(err)), Err: err}
	}
	if len(commands) == 0 || commands[0] == nil {
		return &NotReadyError{
			Reason: "no_waitaof", Err: errors.New("durability aof needs WAITAOF, which this server does not have"),
			Remedy: "use Redis 7.2 or later, or Valkey, or set the durability to replicas=N or none",
		}
	}
	info, err := s.info(ctx, "persistence")
	if err != nil {
		return err
	}
	if info["aof_enabled"] != "1" {
		return &NotReadyError{
			Reason: "aof_off", Err: errors.New("durability aof is asked for and the server has no append-only file"),
			Remedy: "set appendonly yes",
		}
	}
	return nil
}

// info returns sections of INFO, whose fields have different names.
func (s *Sink) info(ctx context.Context, sections ...string) (map[string]string, error) {
	t, err := s.client.Info(ctx, sections...).Result()
	if err != nil {
		return nil, &NotReadyError{Reason: "unreachable", Remedy: Remedy(Class(err)), Err: err}
	}
	m := make(map[string]string)
	for line := range strings.SplitSeq(t, "\r\n") {
		if k, v, ok := strings.Cut(line, ":"); ok {
			m[k] = v
		}
	}
	return m, nil
}

// Warning is a setting of Redis under which events can be lost although everything runs.
type Warning struct {
	// Name is "eviction_policy" or "aof_off".
	Name string
	// Text says what is wrong, and Remedy in one sentence what an operator can do.
	Text, Remedy string
}

// Warnings looks for unsafe settings of Redis.
func (s *Sink) Warnings(ctx context.Context) ([]Warning, error) {
	info, err := s.info(ctx, "memory", "persistence")
	if err != nil {
		return nil, err
	}
	var w []Warning
	if p := info["maxmemory_policy"]; unsafeEviction(p) {
		w = append(w, Warning{
			Name:   "eviction_policy",
			Text:   fmt.Sprintf("maxmemory-policy is %s: Redis may delete streams and gates when memory is short", p),
			Remedy: "set maxmemory-policy noeviction",
		})
	}
	if info["aof_enabled"] == "0" {
		w = append(w, Warning{
			Name:   "aof_off",
			Text:   "the append-only file is off: a restart of Redis loses every event since the last snapshot",
			Remedy: "set appendonly yes",
		})
	}
	return w, nil
}

func unsafeEviction(policy string) bool { return policy != "" && policy != "noeviction" }
