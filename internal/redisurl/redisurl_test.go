package redisurl

import (
	"crypto/tls"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

var must = testenv.Must

func TestParse(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]redis.UniversalOptions{
		"redis://u:p@a:1/3?pool_size=7&client_name=n": {
			Addrs: []string{"a:1"}, Username: "u", Password: "p", DB: 3,
		},
		"redis://a?pool_size=7&client_name=n":               {Addrs: []string{"a:6379"}},
		"unix:///run/r.sock?db=2&pool_size=7&client_name=n": {Addrs: []string{"/run/r.sock"}, DB: 2},
		"redis://u:p@a:1?addr=b:2&addr=c:3&pool_size=7&client_name=n": {
			Addrs: []string{"a:1", "b:2", "c:3"}, Username: "u", Password: "p", IsClusterMode: true,
		},
		"redis://a:1/0?addr=a:1&pool_size=7&client_name=n": {Addrs: []string{"a:1"}, IsClusterMode: true},
		"redis://su:sp@s:1?master_name=m&addr=s2:2&username=u&password=p&db=4&pool_size=7&client_name=n": {
			Addrs: []string{"s:1", "s2:2"}, MasterName: "m", SentinelUsername: "su", SentinelPassword: "sp",
			Username: "u", Password: "p", DB: 4,
		},
		"redis://s?master_name=m&pool_size=7&client_name=n": {Addrs: []string{"s:6379"}, MasterName: "m"},
	} {
		got, err := Parse(url)
		if err != nil {
			t.Errorf("%s: %v", url, err)
			continue
		}
		if !slices.Equal(got.Addrs, want.Addrs) || got.MasterName != want.MasterName ||
			got.IsClusterMode != want.IsClusterMode || got.DB != want.DB || got.Username != want.Username ||
			got.Password != want.Password || got.SentinelUsername != want.SentinelUsername ||
			got.SentinelPassword != want.SentinelPassword {
			t.Errorf("%s: got %+v", url, got)
		}
		if got.PoolSize != 7 || got.ClientName != "n" {
			t.Errorf("%s: the options are lost: pool %d, name %q", url, got.PoolSize, got.ClientName)
		}
		if got.TLSConfig != nil {
			t.Errorf("%s: TLS", url)
		}
		client := redis.NewUniversalClient(got)
		defer client.Close()
		switch client.(type) {
		case *redis.ClusterClient:
			if !want.IsClusterMode {
				t.Errorf("%s: a cluster", url)
			}
		case *redis.Client:
			if want.IsClusterMode {
				t.Errorf("%s: one server", url)
			}
		default:
			t.Errorf("%s: a client of type %T", url, client)
		}
	}
}

// With TLS each certificate must be for the dialled address.
func TestParseTLS(t *testing.T) {
	t.Parallel()
	for _, url := range []string{
		"rediss://a", "rediss://a?addr=b:1", "rediss://a?master_name=m&addr=b:1",
	} {
		o, err := Parse(url)
		if err != nil || o.TLSConfig == nil || o.TLSConfig.ServerName != "" ||
			o.TLSConfig.MinVersion != tls.VersionTLS12 || o.TLSConfig.InsecureSkipVerify {
			t.Errorf("%s: %+v, %v", url, o, err)
		}
	}
}

func TestWhatIsRefused(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{
		"redis://:geheim@a:1/1?addr=b:2":                              "database 0 only",
		"redis://:geheim@a:1?addr=b:2&db=1":                           "known options",
		"unix://u:geheim@/run/s?addr=b:1":                             "not for a socket",
		"unix://u:geheim@/run/s?master_name=b":                        "not for a socket",
		"redis://:geheim@a?master_name=":                              "master_name=name",
		"redis://:geheim@a?master_name=m&password=geheim&addr=geheim": "master_name=name",
		"redis://:geheim@a?master_name=m&db=geheim":                   "master_name=name",
		"redis://:geheim@a?addr=geheim":                               "addr=host:port",
		"redis://:geheim@a?geheim=1":                                  "known options",
		"redis://:geheim@a?addr=b:1&read_only=true":                   "read_only",
		"redis://:geheim@a?addr=b:1&route_by_latency=true":            "route_by_latency",
		"redis://:geheim@a?master_name=m&route_randomly=true":         "route_randomly",
		"redis://:geheim@a?master_name=m&replica_only=true":           "replica_only",
		"redis://:gehe%zzim@a":                                        "percent-encoded",
		"http://:geheim@a":                                            "want redis://",
		"http://:geheim@a?addr=b:1":                                   "want redis://",
		"http://:geheim@a?master_name=m":                              "want redis://",
	} {
		_, err := Parse(url)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "gehe") {
			t.Errorf("%s: %v, want %q", url, err, want)
		}
	}
}

// ready returns the error of a command of a client of o.
func ready(t *testing.T, o *redis.UniversalOptions) error {
	t.Helper()
	o.MaxRetries = -1
	client := redis.NewUniversalClient(o)
	defer client.Close()
	return client.Ping(t.Context()).Err()
}

func parse(t *testing.T, url string) *redis.UniversalOptions {
	t.Helper()
	o, err := Parse(url)
	must(t, err)
	return o
}

// A node of a cluster is recognized before a client is made, or at its first answer.
func TestOneAddressOfACluster(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "cluster-enabled yes")
	url := "redis://" + r.Addr()
	o := parse(t, url)
	if err := ready(t, o); err == nil || !strings.Contains(err.Error(), "node of a cluster") {
		t.Errorf("believed to be one server: %v", err)
	}
	if err := Resolve(o, Mode(t.Context(), o)); err != nil || !o.IsClusterMode || o.OnConnect != nil {
		t.Errorf("%+v, %v", o, err)
	}
	o = parse(t, url+"/1")
	if err := Resolve(o, Mode(t.Context(), o)); err == nil || !strings.Contains(err.Error(), "database 0") {
		t.Errorf("with a database: %v", err)
	}
	o = parse(t, url)
	o.Protocol = 2
	if got := Mode(t.Context(), o); got != "cluster" {
		t.Errorf("RESP2: %q", got)
	}
}

// The mode can be queried without any rights.
func TestAUserWithoutRightsMayAsk(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "cluster-enabled yes", "user weak on >secret -@all +get ~*")
	o := parse(t, "redis://weak:secret@"+r.Addr())
	if got := Mode(t.Context(), o); got != "cluster" {
		t.Errorf("got %q", got)
	}
}

func TestOneServer(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	o := parse(t, "redis://"+r.Addr()+"/2")
	mode := Mode(t.Context(), o)
	if err := Resolve(o, mode); err != nil || mode != "standalone" || o.IsClusterMode {
		t.Errorf("%q, %v, %+v", mode, err, o)
	}
	if err := ready(t, o); err != nil {
		t.Errorf("not usable: %v", err)
	}
}

// An address that does not answer delays a start only briefly, and counts as one server.
func TestAnAddressThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close() // it accepts, and never answers
	for _, addr := range []string{l.Addr().String(), "127.0.0.1:1"} {
		o := parse(t, "redis://"+addr)
		done := make(chan string, 1)
		go func() { done <- Mode(t.Context(), o) }()
		select {
		case mode := <-done:
			if err := Resolve(o, mode); err != nil || mode != "" || o.IsClusterMode || o.OnConnect == nil {
				t.Errorf("%s: %q, %v, %+v", addr, mode, err, o)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%s: no answer", addr)
		}
	}
}
