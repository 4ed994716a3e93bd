package app

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/internal/tlsfile"
)

// tls reads the files of TLS, so that all that is wrong with them is a fault.
func (p *parser) tls(c *Config, s Settings) {
	c.HTTPTLS = p.listenerTLS("http", tlsfile.Names{Cert: s.HTTPTLSCert, Key: s.HTTPTLSKey, CA: s.HTTPClientCA})
	c.AdminTLS = p.listenerTLS("admin", tlsfile.Names{Cert: s.AdminTLSCert, Key: s.AdminTLSKey, CA: s.AdminClientCA})
	c.AdminMTLS = s.AdminClientCA != ""
}

func (p *parser) listenerTLS(name string, n tlsfile.Names) *tlsfile.Files {
	if (n.Cert == "") != (n.Key == "") {
		p.faults = append(p.faults, fmt.Errorf("--%s-tls-cert and --%s-tls-key need each other", name, name))
		return nil
	}
	if n.CA != "" && n.Cert == "" {
		p.faults = append(p.faults, fmt.Errorf("--%s-client-ca needs --%s-tls-cert", name, name))
		return nil
	}
	return p.load("--"+name+"-tls-cert", n)
}

// load reads files. Its fault has the name of one of the settings; which file is wrong is in its text.
func (p *parser) load(setting string, n tlsfile.Names) *tlsfile.Files {
	f, err := tlsfile.Load(n)
	if err != nil {
		p.faults = append(p.faults, fmt.Errorf("%s: %w", setting, err))
	}
	return f
}

// withTLS has srv speak TLS if there are files, and log as the process does.
func withTLS(f *tlsfile.Files, log *slog.Logger, srv *http.Server) *http.Server {
	srv.ErrorLog = slog.NewLogLogger(serverLog{log.Handler()}, slog.LevelWarn)
	if f != nil {
		srv.TLSConfig = f.Server()
	}
	return srv
}

// serverLog takes what a server of HTTP says by itself. What strangers do to a listener must not fill the log, so
// handshakes that failed are there for debugging only.
type serverLog struct{ slog.Handler }

// Handle implements slog.Handler.
func (l serverLog) Handle(ctx context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, "http: TLS handshake error") {
		if r.Level = slog.LevelDebug; !l.Enabled(ctx, r.Level) {
			return nil
		}
	}
	return l.Handler.Handle(ctx, r)
}

// useTLS logs and shows what becomes of the files that a process uses.
func useTLS(log *slog.Logger, reg prometheus.Registerer, files tlsfile.Collector) {
	for _, f := range files {
		f.LogTo(log)
	}
	reg.MustRegister(files)
}
