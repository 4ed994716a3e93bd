// Package tlsfile serves and dials TLS with certificates, keys and CAs in files. It reads changed files again, at
// most once a second, when a connection is made or the metrics are read.
//
// It compares the content of the files, not their times, so they may be replaced in any way. Files are used together
// or not at all: while a key does not match its certificate, or a file is missing, the last valid content stays in
// use, and a log line and a counter report it. Existing connections are never closed. Keys are never logged.
package tlsfile

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	// every is the shortest interval between two reads.
	every = time.Second
	// soon is how long before its expiry a certificate gives a warning.
	soon = 7 * 24 * time.Hour
)

// Names are the paths of PEM files; each may be empty. Cert has the leaf first, and needs Key. CA has the
// certificates that must sign the peer's certificate.
type Names struct{ Cert, Key, CA string }

// Any reports whether a file is named.
func (n Names) Any() bool { return n != Names{} }

// Files are files and their content. They are safe for concurrent use. A nil *Files has no file.
type Files struct {
	names Names
	// now is the clock, for tests.
	now func() time.Time

	current atomic.Pointer[content]
	// rejected counts reads of files that could not be used.
	rejected atomic.Int64

	// mu guards the following fields. A caller that does not get it uses the current content.
	mu     sync.Mutex
	log    *slog.Logger
	looked time.Time
	// said is the last error that was logged.
	said string
	// warned reports whether the expiry of the current certificate was logged.
	warned bool
}

// content is the parsed content of the files. It is immutable.
type content struct {
	raw    [3][]byte
	cert   *tls.Certificate
	ca     *x509.CertPool
	client *tls.Config
}

// none is the content of nil Files.
var none = &content{client: &tls.Config{MinVersion: tls.VersionTLS12}}

// Load reads the files. Its error names the faulty file; the caller adds its settings. It returns nil if no file is
// named.
func Load(n Names) (*Files, error) {
	if !n.Any() {
		return nil, nil //nolint:nilnil // no files
	}
	if (n.Cert == "") != (n.Key == "") {
		return nil, errors.New("a certificate and its key need each other")
	}
	c, err := n.read(nil)
	if err != nil {
		return nil, err
	}
	f := &Files{names: n, now: time.Now, log: slog.New(slog.DiscardHandler), looked: time.Now()}
	f.current.Store(c)
	return f, nil
}

// LogTo logs changes of the files to log, and an expiry that is near.
func (f *Files) LogTo(log *slog.Logger) {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.log = log
	f.warnOfEnd(f.current.Load())
}

// read reads the files. It returns old if they are unchanged.
func (n Names) read(old *content) (*content, error) {
	c := &content{}
	for i, name := range []string{n.Cert, n.Key, n.CA} {
		if name == "" {
			continue
		}
		var err error
		if c.raw[i], err = os.ReadFile(name); err != nil {
			return nil, err
		}
	}
	if old != nil && bytes.Equal(c.raw[0], old.raw[0]) && bytes.Equal(c.raw[1], old.raw[1]) &&
		bytes.Equal(c.raw[2], old.raw[2]) {
		return old, nil
	}
	if err := whole(c.raw[0], n.Cert); err != nil {
		return nil, err
	}
	if err := whole(c.raw[2], n.CA); err != nil {
		return nil, err
	}
	if n.Cert != "" {
		pair, err := tls.X509KeyPair(c.raw[0], c.raw[1])
		if err != nil {
			return nil, fmt.Errorf("certificate %s with key %s: %w", n.Cert, n.Key, err)
		}
		c.cert = &pair
	}
	if n.CA != "" {
		c.ca = x509.NewCertPool()
		if !c.ca.AppendCertsFromPEM(c.raw[2]) {
			return nil, fmt.Errorf("%s has no certificate in PEM", n.CA)
		}
	}
	c.client = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: c.ca}
	if c.cert != nil {
		c.client.Certificates = []tls.Certificate{*c.cert}
	}
	return c, nil
}

// whole returns an error if a file has a malformed PEM block: the parser of certificates skips those.
func whole(text []byte, name string) error {
	begun := bytes.Count(text, []byte("-----BEGIN "))
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		begun--
		if block.Type != "CERTIFICATE" {
			continue
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	if begun > 0 {
		return fmt.Errorf("%s has a damaged block of PEM, or ends within one", name)
	}
	return nil
}

// latest reads the files if the last read is old enough, and returns the content in use.
func (f *Files) latest() *content {
	if f == nil {
		return none
	}
	if !f.mu.TryLock() {
		return f.current.Load()
	}
	defer f.mu.Unlock()
	old := f.current.Load()
	now := f.now()
	if now.Sub(f.looked) < every {
		return old
	}
	f.looked = now
	c, err := f.names.read(old)
	if err != nil {
		f.rejected.Add(1)
		if text := err.Error(); text != f.said {
			f.said = text
			f.log.Error("the changed TLS files cannot be used; the previous ones stay in use", "err", err)
		}
		return old
	}
	f.said = ""
	if c != old {
		f.current.Store(c)
		f.warned = false
		f.log.Info("TLS files read again", "cert", f.names.Cert, "ca", f.names.CA, "valid_until", c.end())
	}
	f.warnOfEnd(c)
	return c
}

// warnOfEnd warns once of a certificate that expires soon or has expired.
func (f *Files) warnOfEnd(c *content) {
	if end := c.end(); !f.warned && !end.IsZero() && f.now().Add(soon).After(end) {
		f.warned = true
		f.log.Warn("a TLS certificate ends soon, or has ended", "cert", f.names.Cert, "valid_until", end)
	}
}

// end is the expiry of the certificate; zero without one.
func (c *content) end() time.Time {
	if c.cert == nil {
		return time.Time{}
	}
	return c.cert.Leaf.NotAfter
}

// Server returns a configuration for an HTTP listener: TLS 1.2 at least. With a CA it requires a client certificate
// signed by it on each connection. It resumes no sessions, because that would skip the check.
func (f *Files) Server() *tls.Config {
	config := func(c *content) *tls.Config {
		t := &tls.Config{
			MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{*c.cert},
			NextProtos: []string{"h2", "http/1.1"},
		}
		if c.ca != nil {
			t.ClientCAs, t.ClientAuth, t.SessionTicketsDisabled = c.ca, tls.RequireAndVerifyClientCert, true
		}
		return t
	}
	first := config(f.current.Load())
	first.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return config(f.latest()), nil }
	return first
}

// Client returns a configuration for connections to a server: TLS 1.2 at least. A server's certificate must be signed
// by the CA or, without one, by a CA of the system. It returns the same configuration until the files change.
func (f *Files) Client() *tls.Config { return f.latest().client }

// Dial connects with TLS 1.2 at least. The server's certificate must be for the host of addr, and signed by the CA
// or, without one, by a CA of the system. skipVerify turns this check off, which is insecure. ctx also bounds the
// handshake.
func (f *Files) Dial(ctx context.Context, network, addr string, skipVerify bool) (net.Conn, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("address %q: %w", addr, err)
	}
	t := f.Client().Clone()
	t.ServerName, t.InsecureSkipVerify = host, skipVerify
	return (&tls.Dialer{Config: t}).DialContext(ctx, network, addr)
}

var (
	endDesc = prometheus.NewDesc("tls_certificate_expiry_timestamp_seconds",
		"When the certificate in use ends, as seconds since 1970; 0 without one.", []string{"use"}, nil)
	rejectedDesc = prometheus.NewDesc("tls_files_rejected_total",
		"Reads of changed certificate files that could not be used; the previous files stay in use.",
		[]string{"use"}, nil)
)

// Collector exports the state of files by their use; nil Files give zeros.
type Collector map[string]*Files

func (Collector) Describe(ch chan<- *prometheus.Desc) { ch <- endDesc; ch <- rejectedDesc }

// Collect implements prometheus.Collector. It reads the files, so that a change shows without connections.
func (m Collector) Collect(ch chan<- prometheus.Metric) {
	for use, f := range m {
		var end, rejected float64
		if f != nil {
			if at := f.latest().end(); !at.IsZero() {
				end = float64(at.Unix())
			}
			rejected = float64(f.rejected.Load())
		}
		ch <- prometheus.MustNewConstMetric(endDesc, prometheus.GaugeValue, end, use)
		ch <- prometheus.MustNewConstMetric(rejectedDesc, prometheus.CounterValue, rejected, use)
	}
}
