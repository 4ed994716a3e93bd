package credits

import (
	"context"
	_ "embed" // the library
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
)

// library is the Redis Function library. It is loaded with REPLACE, which touches the functions of this version only.
//
//go:embed lua/credits_v1.lua
var library string

// Names of the functions.
const (
	fnAdd    = "cr_add_v1"
	fnDeduct = "cr_deduct_v1"
	fnGet    = "cr_get_v1"
	fnCheck  = "cr_check_v1"
	fnLock   = "cr_lock_v1"
	fnUnlock = "cr_unlock_v1"
	fnLoad   = "cr_load_v1"
	fnFreeze = "cr_freeze_v1"
	fnAck    = "cr_ack_v1"
	fnLook   = "cr_look_v1"
	fnInit   = "cr_init_v1"
	fnStop   = "cr_stop_v1"
	fnOpen   = "cr_open_v1"
	fnClaim  = "cr_claim_v1"
)

// NewClient returns a client for url, which names one server, a cluster or sentinels in the forms of go-redis. The
// client does not resend commands: after a resend, this package could not distinguish "nothing was done" from "the
// outcome is unknown". NewClient also returns the Connections of the client, for a Bank. The caller closes the client.
func NewClient(url string) (redis.UniversalClient, *Connections, error) {
	o, err := redisurl.Parse(url)
	if err != nil {
		return nil, nil, fmt.Errorf("redis URL: %w", err)
	}
	connections := Configure(o)
	return redis.NewUniversalClient(o), connections, nil
}

// Configure sets the options that this package requires. Addresses, credentials and TLS settings in o do not change. It
// returns the Connections for a client made with o; pass them to New.
func Configure(o *redis.UniversalOptions) *Connections {
	c := &Connections{before: o.OnConnect}
	o.OnConnect = c.onConnect
	redisurl.Prompt(o)
	o.MaxRetries = -1
	o.ReadTimeout = waitTimeout + 500*time.Millisecond
	// During a burst of calls, a call waits for a connection instead of failing.
	o.PoolTimeout = patience
	return c
}

// eachPrimary calls f on every primary at once.
func eachPrimary(ctx context.Context, c redis.UniversalClient, f func(context.Context, *redis.Client) error) error {
	nodes, err := redisurl.Primaries(ctx, c)
	if err != nil {
		return fmt.Errorf("credits: %w", err)
	}
	return redisurl.Each(ctx, nodes, func(ctx context.Context, n redisurl.Node) error { return f(ctx, n.Client) })
}

// primary returns the node that has key. After an error, which is an errNotSent, nothing was sent.
func primary(ctx context.Context, c redis.UniversalClient, key string) (*redis.Client, error) {
	node, err := redisurl.Holder(ctx, c, key)
	if err != nil {
		return nil, fmt.Errorf("%w: find the node: %w", errNotSent, err)
	}
	return node, nil
}

// loadLibrary puts the functions on every primary.
func loadLibrary(ctx context.Context, c redis.UniversalClient) error {
	err := eachPrimary(ctx, c, func(ctx context.Context, c *redis.Client) error {
		return c.FunctionLoadReplace(ctx, library).Err()
	})
	if err != nil {
		return fmt.Errorf("load the functions: %w", err)
	}
	return nil
}

func functionMissing(err error) bool {
	return err != nil && strings.Contains(err.Error(), "Function not found")
}

// call runs a function. If the server does not have it (a new primary, FUNCTION FLUSH), call loads the library first.
func call(ctx context.Context, c redis.UniversalClient, fn string, keys []string, args ...any) ([]string, error) {
	r, err := c.FCall(ctx, fn, keys, args...).StringSlice()
	if functionMissing(err) {
		loaded := loadLibrary(ctx, c)
		// Loading may fail because another node of the cluster is down. Only the node that has the keys matters.
		if r, err = c.FCall(ctx, fn, keys, args...).StringSlice(); functionMissing(err) {
			err = errors.Join(err, loaded)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("call %s: %w", fn, err)
	}
	return r, nil
}

// nothingDone reports whether a failed call certainly did not happen: it was not sent, or the server refused it. (The
// functions check everything before their first write, so an error reply means that nothing was written.)
func nothingDone(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial" || errors.Is(err, errNotSent) || errors.Is(err, redis.ErrPoolTimeout) ||
		errors.Is(err, redis.ErrClosed) || redisurl.IsReply(err)
}
