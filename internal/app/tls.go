package app

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/internal/tlsfile"
)

// tls loads the files of TLS; each file that cannot be used is a fault.
func (p *parser) tls(c *Config) {
	c.HTTPTLS = p.listenerTLS("http", tlsfile.Names{Cert: c.HTTPTLSCert, Key: c.HTTPTLSKey, CA: c.HTTPClientCA})
	c.AdminTLS = p.listenerTLS("admin", tlsfile.Names{Cert: c.AdminTLSCert, Key: c.AdminTLSKey, CA: c.AdminClientCA})
	// With a URL without TLS, the files for Redis would have no effect, which is a fault.
	n := tlsfile.Names{Cert: c.RedisCert, Key: c.RedisKey, CA: c.RedisCA}
	for _, u := range []struct{ name, value string }{
		{"redis-url", c.RedisURL}, {"guard-redis-url", c.GuardRedisURL},
	} {
		if (n.Any() || c.RedisSkipVerify.On()) && u.value != "" && !strings.HasPrefix(u.value, "rediss://") {
			p.fault("--%s: with --redis-ca, --redis-cert, --redis-key or --redis-skip-verify=on it has to begin with "+
				"rediss://", u.name)
		}
	}
	c.RedisTLS = p.load("--redis-ca, --redis-cert, --redis-key", n)
}

// hasQuery reports whether a valid URL has a parameter.
func hasQuery(rawURL, name string) bool {
	u, err := url.Parse(rawURL)
	return err == nil && u.Query().Has(name)
}

func (p *parser) listenerTLS(name string, n tlsfile.Names) *tlsfile.Files {
	if n.CA != "" && n.Cert == "" {
		p.fault("--%s-client-ca needs --%s-tls-cert", name, name)
		return nil
	}
	return p.load(fmt.Sprintf("--%s-tls-cert, --%[1]s-tls-key", name), n)
}

// load reads files. Its fault names one of the settings; the text names the file.
func (p *parser) load(setting string, n tlsfile.Names) *tlsfile.Files {
	f, err := tlsfile.Load(n)
	if err != nil {
		p.fault("%s: %w", setting, err)
	}
	return f
}

// withTLS makes srv use TLS if there are files, and log to log.
func withTLS(f *tlsfile.Files, log *slog.Logger, srv *http.Server) *http.Server {
	srv.ErrorLog = slog.NewLogLogger(serverLog{log.Handler()}, slog.LevelWarn)
	if f != nil {
		srv.TLSConfig = f.Server()
	}
	return srv
}

// serverLog takes the messages of an HTTP server. Failed handshakes, which any client can cause, are logged at level
// debug only.
type serverLog struct{ slog.Handler }

func (l serverLog) Handle(ctx context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, "http: TLS handshake error") {
		if r.Level = slog.LevelDebug; !l.Enabled(ctx, r.Level) {
			return nil
		}
	}
	return l.Handler.Handle(ctx, r)
}

// useTLS logs and exports changes of the files in use, and warns if Redis' certificate is not verified.
func (c Config) useTLS(log *slog.Logger, reg prometheus.Registerer, files tlsfile.Collector) {
	files["admin"], files["redis"] = c.AdminTLS, c.RedisTLS
	if c.RedisSkipVerify.On() {
		log.Warn("the certificate of Redis is not verified: an attacker on the network can read and change everything",
			"setting", "--redis-skip-verify=on", "remedy", "set --redis-ca to the CA of its certificate")
	}
	for _, f := range files {
		f.LogTo(log)
	}
	reg.MustRegister(files)
}
