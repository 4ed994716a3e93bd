package redisurl

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
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

// Refused reports whether a server, or a proxy in front of it, refuses a command in any wording. Errors that end by
// themselves, and those of connections and credentials, are no refusals.
func Refused(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply) && !errors.Is(err, redis.Nil) &&
		!slices.ContainsFunc(temporary, func(p string) bool { return strings.HasPrefix(reply.Error(), p) })
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
