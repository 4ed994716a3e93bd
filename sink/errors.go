package sink

import (
	"errors"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/socket"
	"posthaste/sink/metrics"
)

// replies classifies error replies; the first matching prefix counts. A server refuses a poison event however often it
// is sent. All other errors are temporary. (See delivery.refusedAll for unknown ones.)
var replies = []struct {
	prefix string
	class  string
	poison bool
}{
	{"OOM", "oom", false},
	{"READONLY", "readonly", false},
	{"LOADING", "loading", false},
	{"MISCONF", "misconf", false},
	{"NOREPLICAS", "noreplicas", false},
	{"CLUSTERDOWN", "clusterdown", false},
	{"MOVED", "moved", false},
	{"ASK", "moved", false},
	{"TRYAGAIN", "tryagain", false},
	{"CROSSSLOT", "crossslot", false},
	{"BUSY", "busy", false},
	{"NOPERM", "noperm", false},
	// The messages for a command inside a script, of Redis 7.0 and of later servers.
	{"ERR The user executing the script", "noperm", false},
	{"ERR ACL failure in script", "noperm", false},
	{"NOAUTH", "noauth", false},
	{"WRONGPASS", "noauth", false},
	{"MASTERDOWN", "masterdown", false},
	// The stream's key holds something else, so no event of the type can be published.
	{"WRONGTYPE", classWrongType, true},
	// The gate's key holds something else; the events are not the cause.
	{"GATETYPE", "gatetype", false},
	{"ERR Elements are too large", classTooLarge, true},
	{"ERR The stream has exhausted", "exhausted", false},
}

// classes are all values of the label class: the classes of replies and of other errors.
var classes = func() []string {
	list := []string{
		"timeout", "connection", "tls", "canceled", "durability", "restarted", "gap", "fenced", "foreign",
		classOther,
	}
	for _, r := range replies {
		if !slices.Contains(list, r.class) {
			list = append(list, r.class)
		}
	}
	return list
}()

// The classes of poison. Replies of an unknown kind are classOther, and poison only as delivery.refusedAll finds out.
const (
	classOther     = metrics.Other
	classWrongType = "wrongtype"
	classTooLarge  = "too_large"
)

// Class returns the class of an error of this package for logs and metrics, one of a closed set; "" for nil.
func Class(err error) string {
	var durability *DurabilityError
	var reply redis.Error
	switch class := metrics.Class(err); {
	case errors.Is(err, errOther):
		return "restarted"
	case errors.Is(err, errSilent):
		return "connection"
	case errors.As(err, &durability):
		return "durability"
	case class != classOther:
		return class
	case errors.Is(err, redis.ErrPoolTimeout):
		return "timeout"
	case lostConnection(err):
		return "connection"
	case errors.As(err, &reply):
		class, _ = classify(reply.Error())
		return class
	}
	return classOther
}

// classify returns the class of an error reply.
func classify(reply string) (class string, poison bool) {
	for _, r := range replies {
		if strings.HasPrefix(reply, r.prefix) {
			return r.class, r.poison
		}
	}
	return classOther, false
}

// replyError is an error reply that a script passed on as a value.
type replyError string

func (e replyError) Error() string { return string(e) }

// RedisError marks the type as an error reply, as go-redis does.
func (replyError) RedisError() {}

// lostConnection reports whether an established connection ended during a call, so that its execution is unknown.
func lostConnection(err error) bool {
	return socket.Lost(err) || redis.HasErrorPrefix(err, "Protocol error") // go-redis removes ERR
}
