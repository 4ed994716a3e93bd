package idem

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
)

//go:embed lua/*.lua
var luaFiles embed.FS

// Names of the scripts, the values of the script label of idem_script_seconds.
const (
	scriptAcquire   = "acq"
	scriptHeartbeat = "hb"
	scriptRelease   = "rel"
	scriptPublish   = "pub"
)

var scriptNames = []string{scriptAcquire, scriptHeartbeat, scriptRelease, scriptPublish}

// callTimeout bounds one script call including its resend.
const callTimeout = 500 * time.Millisecond

// errUnusable means that the guard has no Redis: none is configured, or the breaker is open.
var errUnusable = errors.New("redis is not in use")

func loadScripts() map[string]*redis.Script {
	scripts := make(map[string]*redis.Script, len(scriptNames))
	for _, name := range scriptNames {
		b, err := luaFiles.ReadFile("lua/" + name + ".lua")
		if err != nil {
			panic(err) // embedded: the build is broken
		}
		scripts[name] = redis.NewScript(string(b))
	}
	return scripts
}

// eval runs a script on key's record and returns its reply as strings. A script the server does not know is sent in
// full, which also loads it again.
func (g *Guard) eval(ctx context.Context, name string, key Key, args ...any) ([]string, error) {
	n, err := g.nodeOf(ctx, key)
	if err != nil {
		return nil, err
	}
	cmd, err := call(ctx, n, g.timeout, func(ctx context.Context) (*redis.Cmd, error) {
		start := time.Now()
		defer func() { g.metrics.scripts.WithLabelValues(name).Observe(time.Since(start).Seconds()) }()
		cmd := g.scripts[name].Run(ctx, g.client, []string{key.String()}, args...)
		return cmd, cmd.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("run script %s: %w", name, err)
	}
	return replyOf(cmd)
}

// checkHold is how long the record of a Check stays.
const checkHold = 100 * time.Millisecond

// Check acquires a new key briefly and returns the error of the guard's server: a server that answers may be out of
// memory, read-only, or refuse scripts. In a cluster it checks every master, and the error names the failed one. It
// ignores the breaker and does not change it. Then it reads the server's memory; see Short.
func (g *Guard) Check(ctx context.Context) error {
	if g.client == nil {
		return errUnusable
	}
	ctx, cancel := context.WithTimeout(ctx, g.timeout)
	defer cancel()
	nodes, err := redisurl.Primaries(ctx, g.client)
	if err != nil {
		return err
	}
	err = redisurl.Each(ctx, nodes, func(ctx context.Context, n redisurl.Node) error {
		attempt, key := g.checkKey(ctx, n)
		hold := checkHold.Milliseconds()
		return g.scripts[scriptAcquire].Run(ctx, g.client, []string{key.String()}, Fingerprint{}.text(), attempt, hold,
			hold).Err()
	})
	if err != nil {
		return err
	}
	_ = g.askMemory(ctx, askInfo) // some servers refuse INFO
	return nil
}

// checkKey returns a new key of a node: an old record would be answered without a write. A node that has so few slots
// that none of many keys is there gets another one's.
func (g *Guard) checkKey(ctx context.Context, n redisurl.Node) (attempt string, key Key) {
	cluster, many := g.client.(*redis.ClusterClient)
	for range 256 {
		attempt = newAttempt()
		key = NewKey("check", attempt)
		if !many {
			break
		}
		if c, err := cluster.MasterForKey(ctx, key.String()); err != nil || c == n.Client {
			break
		}
	}
	return attempt, key
}

// replyOf returns the reply of a script: one string, or several.
func replyOf(cmd *redis.Cmd) ([]string, error) {
	if text, err := cmd.Text(); err == nil {
		return []string{text}, nil
	}
	reply, err := cmd.StringSlice()
	if err == nil && len(reply) == 0 {
		err = errors.New("script reply is empty")
	}
	return reply, err
}
