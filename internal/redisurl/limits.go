package redisurl

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// maxArgs bounds the arguments of one call, including the command. Some services refuse calls with 4,000.
const maxArgs = 3900

// Fit returns how many items of width arguments each one call may have in addition to its first arguments.
func Fit(first, width int) int { return max(1, (maxArgs-first)/width) }

// temporary are the prefixes of replies that are no refusal of the command itself.
var temporary = []string{
	"LOADING", "MASTERDOWN", "CLUSTERDOWN", "MOVED", "ASK", "TRYAGAIN", "READONLY", "BUSY", "MISCONF", "OOM", "NOAUTH",
	"WRONGPASS", "ERR max number of clients",
}

// IsReply reports whether err is a server's reply, as opposed to a lost connection or a timeout. redis.Nil is one.
func IsReply(err error) bool {
	_, ok := errors.AsType[redis.Error](err)
	return ok
}

// Refused reports whether a server, or a proxy in front of it, refuses a command in any wording. Errors that end by
// themselves, and those of connections and credentials, are no refusals.
func Refused(err error) bool {
	reply, ok := errors.AsType[redis.Error](err)
	return ok && !errors.Is(err, redis.Nil) &&
		!slices.ContainsFunc(temporary, func(p string) bool { return strings.HasPrefix(reply.Error(), p) })
}

// Prompt sets the options of a client of many short calls, each of which must end in time: a call obeys its context,
// and dialing and writing take 250 ms at most. It leaves retries, and the time for a reply and for a connection, to
// the caller.
func Prompt(o *redis.UniversalOptions) {
	o.ContextTimeoutEnabled = true
	o.DialTimeout = 250 * time.Millisecond
	o.DialerRetries = 1
	o.WriteTimeout = 250 * time.Millisecond
	// A waiting command occupies a connection; the default of ten per core is too few for hundreds of calls at once.
	o.PoolSize = max(o.PoolSize, 64)
	// Without CLIENT SETINFO and notifications, a new connection saves round trips.
	o.Protocol = 2
	o.DisableIdentity = true
	o.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
}

// Name makes the connections of o's client tell the server the ClientName of o. The library closes a connection on
// which that is refused.
func Name(o *redis.UniversalOptions) {
	name, before := o.ClientName, o.OnConnect
	o.ClientName = ""
	if name == "" {
		return
	}
	o.OnConnect = func(ctx context.Context, cn *redis.Conn) error {
		if err := cn.ClientSetName(ctx, name).Err(); err != nil && !Refused(err) {
			return err
		}
		if before != nil {
			return before(ctx, cn)
		}
		return nil
	}
}
