// Package redisurl says what a URL of Redis means: one server, a cluster, or a server that Sentinel watches over. It is
// the one place where that is decided; who makes a client adds how it waits and repeats.
//
// The forms are those of go-redis:
//
//	redis://user:password@host:6379/0                         one server, or a node of a cluster
//	unix://user:password@/path/to/socket?db=0                 one server
//	redis://user:password@a:6379?addr=b:6379&addr=c:6379      a cluster; addr=a:6379 again if it has one address
//	redis://user:password@s1:26379?master_name=m&addr=s2:26379&username=u&password=p&db=0
//
// The last one names sentinels: the user before the host is theirs, username, password and db are the server's. With
// rediss:// every connection is encrypted, those to sentinels too.
package redisurl

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// askFor bounds the question to one address what it is.
const askFor = time.Second

// Parse returns what a URL says, for redis.NewUniversalClient. It does no I/O. No error quotes the URL, which may hold
// a password.
//
// A client of one address refuses every connection if what answers is a node of a cluster, or a Sentinel; see Resolve.
func Parse(rawURL string) (*redis.UniversalOptions, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, errors.New("not a URL (a password with special characters must be percent-encoded)")
	}
	q := u.Query()
	for _, name := range []string{"read_only", "replica_only", "route_by_latency", "route_randomly"} {
		if q.Has(name) {
			return nil, errors.New(name + " is not possible: what is read from a replica may be old")
		}
	}
	if u.Scheme == "unix" && (q.Has("addr") || q.Has("master_name")) {
		return nil, errors.New("addr and master_name are for redis:// and rediss://, not for a socket")
	}
	o := &redis.UniversalOptions{}
	switch {
	case q.Has("master_name"):
		err = sentinels(o, rawURL)
	case q.Has("addr"):
		if db := strings.Trim(u.Path, "/"); db != "" && db != "0" {
			return nil, errDatabase
		}
		err = cluster(o, rawURL)
	default:
		err = server(o, rawURL)
	}
	if err != nil {
		return nil, err
	}
	if o.TLSConfig != nil {
		// Each certificate has to be for the address that is dialled, not for the first one in the URL.
		o.TLSConfig.ServerName, o.TLSConfig.MinVersion = "", tls.VersionTLS12
	}
	return o, nil
}

var errDatabase = errors.New("a cluster has database 0 only")

func server(o *redis.UniversalOptions, rawURL string) error {
	one, err := redis.ParseURL(rawURL)
	if err != nil || one.Addr == "" {
		return errors.New("want redis://[user[:password]@]host[:port][/database], with known options")
	}
	copyFields(o, one)
	o.Addrs = []string{one.Addr}
	o.OnConnect = alone()
	return nil
}

func cluster(o *redis.UniversalOptions, rawURL string) error {
	many, err := redis.ParseClusterURL(rawURL)
	if err != nil {
		return errors.New("a cluster: want redis://[user[:password]@]host[:port]?addr=host:port, with known options")
	}
	copyFields(o, many)
	o.Addrs = distinct(o.Addrs)
	o.IsClusterMode = true
	return nil
}

func sentinels(o *redis.UniversalOptions, rawURL string) error {
	many, err := redis.ParseFailoverURL(rawURL)
	if err != nil || many.MasterName == "" {
		return errors.New("sentinels: want redis://[user:password@]host[:port]?master_name=name&addr=host:port" +
			"[&username=user&password=password][&db=database], with known options")
	}
	copyFields(o, many)
	o.Addrs = distinct(many.SentinelAddrs)
	return nil
}

// distinct keeps the order.
func distinct(list []string) []string {
	var out []string
	for _, s := range list {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// copyFields takes over what from has in fields of the same name: the three kinds of options share nearly all of them.
func copyFields(to *redis.UniversalOptions, from any) {
	src, dst := reflect.ValueOf(from).Elem(), reflect.ValueOf(to).Elem()
	for i := range dst.NumField() {
		name := dst.Type().Field(i).Name
		if v := src.FieldByName(name); v.IsValid() && v.Type() == dst.Field(i).Type() {
			dst.Field(i).Set(v)
		}
	}
}

// Mode asks one address what it is: "standalone", "cluster" for a node of one (managed services have a single address
// for all of a cluster), or "sentinel"; "" if it does not answer in time, or does not say. o has what is needed to
// connect. What is known already is not asked.
func Mode(ctx context.Context, o *redis.UniversalOptions) string {
	if o.IsClusterMode || o.MasterName != "" {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	one := o.Simple()
	one.DB, one.OnConnect = 0, nil // a node of a cluster refuses to select a database
	one.PoolSize, one.MinIdleConns, one.PipelinePoolSize = 1, 0, -1
	one.MaxRetries, one.DialerRetries, one.ContextTimeoutEnabled, one.DialTimeout = -1, 1, true, askFor
	client := redis.NewClient(one)
	defer client.Close()
	mode, _ := ask(ctx, client) // whoever uses the client is told why it cannot connect
	return mode
}

// Resolve makes o that of a cluster if its one address is a node of one, as Mode has found. What is unknown is taken
// for one server: a client of o refuses it when it turns out to be another kind.
func Resolve(o *redis.UniversalOptions, mode string) error {
	switch {
	case mode == "sentinel":
		return errSentinel
	case mode != "cluster":
		return nil
	case o.DB != 0:
		return errDatabase
	case strings.HasPrefix(o.Addrs[0], "/"):
		return errors.New("a node of a cluster is named by host and port, not by a socket")
	}
	o.IsClusterMode, o.OnConnect = true, nil
	return nil
}

var (
	errSentinel = errors.New("this is a Sentinel: name its server with master_name in the URL")
	errCluster  = errors.New("this is a node of a cluster, which did not answer when the process began: restart it, " +
		"or name the cluster in the URL with addr=host:port")
)

// alone returns what looks at the connections of a client for one server, until one of them has said what it is.
func alone() func(ctx context.Context, cn *redis.Conn) error {
	var known atomic.Bool
	return func(ctx context.Context, cn *redis.Conn) error {
		if known.Load() {
			return nil
		}
		mode, err := ask(ctx, cn)
		switch {
		case err != nil:
			return err
		case mode == "cluster":
			return errCluster
		case mode == "sentinel":
			return errSentinel
		}
		known.Store(true)
		return nil
	}
}

// ask returns the mode of a server: standalone, cluster or sentinel; "" if it does not say. Of all commands that tell,
// HELLO is the one that every user may call.
func ask(ctx context.Context, c interface {
	Do(ctx context.Context, args ...any) *redis.Cmd
},
) (string, error) {
	v, err := c.Do(ctx, "hello").Result()
	var refused redis.Error
	if errors.As(err, &refused) {
		return "", nil // something in between that does not know the command
	}
	switch v := v.(type) {
	case map[any]any:
		return fmt.Sprint(v["mode"]), err
	case []any:
		for i := 0; i+1 < len(v); i += 2 {
			if v[i] == "mode" {
				return fmt.Sprint(v[i+1]), err
			}
		}
	}
	return "", err
}
