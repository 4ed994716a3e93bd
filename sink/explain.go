package sink

import (
	"errors"
	"strings"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
	"posthaste/internal/socket"
)

// Explain splits an error of the servers at addr into the problem and the remedy. Both are "" for an error that is not
// of Redis.
func Explain(err error, addr string) (problem, remedy string) {
	var unready *NotReadyError
	if errors.As(err, &unready) {
		if problem, remedy = Explain(unready.Err, addr); problem == "" && unready.Err != nil {
			problem, remedy = unready.Err.Error(), unready.Remedy
		}
		return problem, remedy
	}
	class, at := Class(err), "Redis at "+addr
	reply, answered := errors.AsType[redis.Error](err)
	if node := (*redisurl.NodeError)(nil); errors.As(err, &node) {
		at = "Redis node " + node.Addr
	}
	switch {
	case class == "" || class == "canceled":
		return "", ""
	case redis.HasErrorPrefix(err, "NOAUTH"):
		return at + " requires a password", Remedy(class)
	case redis.HasErrorPrefix(err, "WRONGPASS"):
		return at + " refuses the user or the password", Remedy(class)
	case strings.Contains(err.Error(), "all sentinels") && socket.Failure(err) == "":
		return "no Sentinel at " + addr + " knows the master", "correct master_name in POSTHASTE_REDIS_URL"
	case !answered:
		problem, remedy = socket.Failure(err), Remedy(class)
		switch {
		case problem == "":
			return "", ""
		case problem == "offers no TLS":
			remedy = "turn TLS on there, or use redis:// in POSTHASTE_REDIS_URL"
		case class == "timeout":
			remedy += " (redis:// if it offers no TLS)"
		case class == "connection" && strings.HasPrefix(problem, "closes"):
			remedy += " (rediss:// if it demands TLS), or raise its maxclients"
		}
		return at + " " + problem, remedy
	case strings.Contains(reply.Error(), "cluster support disabled"):
		return at + " is not a cluster", "remove addr= from POSTHASTE_REDIS_URL"
	case class == classOther:
		return "", ""
	}
	code, message, _ := strings.Cut(reply.Error(), " ")
	if code == "ERR" || message == "" {
		message = reply.Error()
	}
	return strings.Replace(err.Error(), reply.Error(), strings.TrimSuffix(message, "."), 1) + " (" + at + ")",
		Remedy(class)
}
