// Package redisurl parses a URL of Redis: one server, a cluster, or a server that Sentinel monitors. No other package
// decides that. The code that makes a client adds timeouts and retries. The package also has the limits of services
// that only resemble Redis.
//
// The forms are those of go-redis:
//
//	redis://user:password@host:6379/0                         one server, or a node of a cluster
//	unix://user:password@/path/to/socket?db=0                 one server
//	redis://user:password@a:6379?addr=b:6379&addr=c:6379      a cluster; addr=a:6379 again if it has one address
//	redis://user:password@s1:26379?master_name=m&addr=s2:26379&username=u&password=p&db=0
//
// In the last form the hosts are sentinels: the user before the host is for them; username, password and db are for
// the server. With rediss:// every connection is encrypted, including those to sentinels.
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

	"posthaste/internal/secretfile"
)

// askFor bounds the query of an address for its mode.
const askFor = time.Second

// Parse returns the options of a URL, for redis.NewUniversalClient. It does no I/O. Its errors do not quote the URL,
// which may contain a password.
//
// A client of one address refuses every connection if the server is a node of a cluster, or a Sentinel; see Resolve.
func Parse(rawURL string) (*redis.UniversalOptions, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, errors.New("not a URL (a password with special characters must be percent-encoded)")
	}
	q := u.Query()
	var file *secretfile.File
	if q.Has(secretfile.Parameter) {
		f := secretfile.Parse(q.Get(secretfile.Parameter))
		file = &f
		q.Del(secretfile.Parameter)
		u.RawQuery = q.Encode()
		rawURL = u.String()
	}
	for _, name := range []string{"read_only", "replica_only", "route_by_latency", "route_randomly"} {
		if q.Has(name) {
			return nil, errors.New(name + " is not possible: replicas may be out of date")
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
	if file != nil {
		o.CredentialsProviderContext = credentials(*file, o.Username)
	}
	if o.TLSConfig != nil {
		// Each certificate must be for the dialled address, not for the first one in the URL.
		o.TLSConfig.ServerName, o.TLSConfig.MinVersion = "", tls.VersionTLS12
	}
	return o, nil
}

// credentials returns a function that reads a file of secrets: the password of user, or a URL with user and password.
// The password of sentinels is not read again.
func credentials(file secretfile.File, user string) func(ctx context.Context) (string, string, error) {
	return func(context.Context) (string, string, error) {
		secret, err := file.Read()
		if err != nil || !file.HasURL() {
			return user, secret, err
		}
		o, err := Parse(secret)
		if err != nil {
			return "", "", fmt.Errorf("%s: %w", file.Setting, err)
		}
		return o.Username, o.Password, nil
	}
}

// HasPassword reports whether a URL has the password of the servers; that of sentinels does not count.
func HasPassword(rawURL string) bool {
	o, err := Parse(rawURL)
	return err == nil && o.Password != ""
}

// AuthRemedy is the remedy if a server refuses the user or the password.
const AuthRemedy = "check user and password in POSTHASTE_REDIS_URL; POSTHASTE_REDIS_PASSWORD_FILE and " +
	"POSTHASTE_REDIS_URL_FILE are read again for each connection"

// LoginRefused reports whether a server refuses the user or the password.
func LoginRefused(err error) bool {
	return redis.HasErrorPrefix(err, "WRONGPASS") || redis.HasErrorPrefix(err, "NOAUTH")
}

// WithAuthRemedy returns err, with AuthRemedy if LoginRefused.
func WithAuthRemedy(err error) error {
	if LoginRefused(err) {
		return fmt.Errorf("%w (%s)", err, AuthRemedy)
	}
	return err
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

// distinct removes duplicates and keeps the order.
func distinct(list []string) []string {
	var out []string
	for _, s := range list {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// copyFields copies the fields of from to those of the same name: the three kinds of options share nearly all.
func copyFields(to *redis.UniversalOptions, from any) {
	src, dst := reflect.ValueOf(from).Elem(), reflect.ValueOf(to).Elem()
	for i := range dst.NumField() {
		name := dst.Type().Field(i).Name
		if v := src.FieldByName(name); v.IsValid() && v.Type() == dst.Field(i).Type() {
			dst.Field(i).Set(v)
		}
	}
}

// Mode queries the mode of the one address in o: "standalone", "cluster" for a node of one (managed services have a
// single address for a whole cluster), or "sentinel"; "" if it does not answer in time. o has the options needed to
// connect. If o has several addresses, Mode needs no query.
func Mode(ctx context.Context, o *redis.UniversalOptions) string {
	if o.IsClusterMode || o.MasterName != "" {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	one := o.Simple()
	one.DB, one.OnConnect, one.ClientName = 0, nil, "" // a node of a cluster refuses to select a database
	one.PoolSize, one.MinIdleConns, one.PipelinePoolSize = 1, 0, -1
	one.MaxRetries, one.DialerRetries, one.ContextTimeoutEnabled, one.DialTimeout = -1, 1, true, askFor
	client := redis.NewClient(one)
	defer client.Close()
	mode, _ := ModeOf(ctx, client) // the client's user gets the error when it connects
	return mode
}

// Resolve makes o the options of a cluster if mode, the result of Mode, is "cluster". An unknown mode counts as one
// server: a client of o refuses a server of another kind.
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

// alone returns a hook that checks the mode on the connections of a client for one server, until one has answered.
func alone() func(ctx context.Context, cn *redis.Conn) error {
	var known atomic.Bool
	return func(ctx context.Context, cn *redis.Conn) error {
		if known.Load() {
			return nil
		}
		mode, err := ModeOf(ctx, cn)
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

// ModeOf returns the mode of a server: standalone, cluster or sentinel; "" if unknown. It uses HELLO, because every
// user may call that.
func ModeOf(ctx context.Context, c interface {
	Do(ctx context.Context, args ...any) *redis.Cmd
},
) (string, error) {
	v, err := c.Do(ctx, "hello").Result()
	if IsReply(err) {
		return "", nil // a proxy that does not know the command
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
