package tlsfile_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/tlsfile"
)

// load loads files that are read at every connection.
func load(t *testing.T, n tlsfile.Names) *tlsfile.Files {
	t.Helper()
	f, err := tlsfile.Load(n)
	must(t, err)
	f.LookAlways()
	return f
}

// listener accepts HTTPS with the configuration, and returns its address.
func listener(t *testing.T, config *tls.Config) string {
	t.Helper()
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Proto)
	}))
	s.Config.TLSConfig = config
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	l := s.Listener
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Config.ServeTLS(l, "", "") }()
	t.Cleanup(func() { _ = s.Config.Close(); <-done })
	return l.Addr().String()
}

// client returns a client that trusts ca and has the certificates.
func client(t *testing.T, ca *testenv.CA, certs ...tls.Certificate) *http.Client {
	t.Helper()
	tr := &http.Transport{
		TLSClientConfig: &tls.Config{
			RootCAs: ca.Pool, Certificates: certs, ClientSessionCache: tls.NewLRUClientSessionCache(9),
		},
		ForceAttemptHTTP2: true,
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 30 * time.Second}
}

// ask makes a request, and returns the serial number of the server's certificate.
func ask(ctx context.Context, c *http.Client, addr string) (serial, proto string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+addr, nil)
	if err != nil {
		return "", "", err
	}
	resp, err := c.Do(req)
	if err != nil {
		return "", "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.TLS.PeerCertificates[0].SerialNumber.String(), string(b), err
}

// Load names the faults of files.
func TestLoadNamesWhatIsWrong(t *testing.T) {
	t.Parallel()
	ca, dir, other := testenv.NewCA(t), t.TempDir(), t.TempDir()
	cert, key, caFile := ca.Files(t, dir)
	_, otherKey, _ := ca.Files(t, other)
	// bundle is a valid certificate between two others; the first lacks its first bytes, the last its last.
	bundle := func(name string, first, last int) string {
		pem, err := os.ReadFile(caFile)
		must(t, err)
		damaged := slices.Clone(pem)
		for i := range first {
			damaged[len("-----BEGIN CERTIFICATE-----\n")+i] = '!'
		}
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, slices.Concat(damaged, pem, pem[:len(pem)-last]), 0o600))
		return path
	}
	for name, c := range map[string]struct {
		names tlsfile.Names
		want  string
	}{
		"no certificate": {tlsfile.Names{Cert: filepath.Join(dir, "gone"), Key: key}, "gone"},
		"no key":         {tlsfile.Names{Cert: cert, Key: filepath.Join(dir, "gone")}, "gone"},
		"another key":    {tlsfile.Names{Cert: cert, Key: otherKey}, otherKey},
		"a key as a CA":  {tlsfile.Names{CA: key}, key},
		"cut off":        {tlsfile.Names{CA: bundle("cut", 0, 60)}, "cut"},
		"damaged":        {tlsfile.Names{CA: bundle("damaged", 1, 0)}, "damaged"},
	} {
		_, err := tlsfile.Load(c.names)
		testenv.ErrorSays(t, name, err, c.want)
	}
	if f, err := tlsfile.Load(tlsfile.Names{}); f != nil || err != nil {
		t.Errorf("no files: %v, %v", f, err)
	}
	_, err := tlsfile.Load(tlsfile.Names{Cert: cert, Key: key, CA: caFile})
	testenv.ErrorIs(t, "all files", err, nil)
}

// A listener with a client CA requires a valid certificate signed by it, and uses HTTP/2.
func TestAClientCAWantsACertificate(t *testing.T) {
	t.Parallel()
	ca, stranger := testenv.NewCA(t), testenv.NewCA(t)
	cert, key, caFile := ca.Files(t, t.TempDir())
	addr := listener(t, load(t, tlsfile.Names{Cert: cert, Key: key, CA: caFile}).Server())
	serverOnly := func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }
	for name, c := range map[string]struct {
		certs []tls.Certificate
		ok    bool
	}{
		"good":     {[]tls.Certificate{ca.Pair(t)}, true},
		"none":     {nil, false},
		"expired":  {[]tls.Certificate{ca.Pair(t, testenv.Expired)}, false},
		"wrong CA": {[]tls.Certificate{stranger.Pair(t)}, false},
		"a server": {[]tls.Certificate{ca.Pair(t, serverOnly)}, false},
	} {
		cl := client(t, ca)
		// With the callback the client also sends a certificate that the server did not request.
		cl.Transport.(*http.Transport).TLSClientConfig.GetClientCertificate = func(*tls.CertificateRequestInfo,
		) (*tls.Certificate, error) {
			if len(c.certs) == 0 {
				return &tls.Certificate{}, nil
			}
			return &c.certs[0], nil
		}
		_, proto, err := ask(t.Context(), cl, addr)
		if (err == nil) != c.ok || c.ok && proto != "HTTP/2.0" {
			t.Errorf("%s: %q, %v", name, proto, err)
		}
	}
	old := &tls.Dialer{Config: &tls.Config{RootCAs: ca.Pool, MaxVersion: tls.VersionTLS11}}
	if conn, err := old.DialContext(t.Context(), "tcp", addr); err == nil {
		conn.Close()
		t.Error("TLS 1.1 is accepted")
	}
}

// After a change of the CA, a client of the old one is refused: no session is resumed.
func TestAClientCAThatChanges(t *testing.T) {
	t.Parallel()
	ca, next := testenv.NewCA(t), testenv.NewCA(t)
	dir := t.TempDir()
	cert, key, caFile := ca.Files(t, dir)
	addr := listener(t, load(t, tlsfile.Names{Cert: cert, Key: key, CA: caFile}).Server())
	before, after := client(t, ca, ca.Pair(t)), client(t, ca, next.Pair(t))
	if _, _, err := ask(t.Context(), before, addr); err != nil {
		t.Fatal(err)
	}
	testenv.WriteFile(t, dir, "ca.crt", next.PEM)
	if _, _, err := ask(t.Context(), before, addr); err != nil { // its connection is not closed
		t.Errorf("on the connection that exists: %v", err)
	}
	before.CloseIdleConnections()
	if _, _, err := ask(t.Context(), before, addr); err == nil {
		t.Error("a certificate of the CA before is accepted")
	}
	if _, _, err := ask(t.Context(), after, addr); err != nil {
		t.Errorf("a certificate of the CA now: %v", err)
	}
}

// Requests succeed while the files are replaced in several ways, and the new certificate is served.
func TestRotationUnderLoad(t *testing.T) {
	t.Parallel()
	for name, rotate := range map[string]func(t *testing.T, dir string, cert, key []byte, between func()){
		// Kubernetes replaces the files of a mounted secret like this.
		"a link": func(t *testing.T, dir string, cert, key []byte, between func()) {
			to, err := os.MkdirTemp(dir, "data-")
			must(t, err)
			testenv.WriteFile(t, to, "tls.crt", cert)
			testenv.WriteFile(t, to, "tls.key", key)
			between()
			replaceLink(t, to, filepath.Join(dir, "data"))
		},
		"certificate first": func(t *testing.T, dir string, cert, key []byte, between func()) {
			testenv.WriteFile(t, dir, "data/tls.crt", cert)
			between()
			testenv.WriteFile(t, dir, "data/tls.key", key)
		},
		"in pieces": func(t *testing.T, dir string, cert, key []byte, between func()) {
			testenv.WriteFile(t, dir, "data/tls.key", nil)
			testenv.WriteFile(t, dir, "data/tls.crt", cert[:len(cert)/2])
			between()
			testenv.WriteFile(t, dir, "data/tls.key", key)
			between()
			testenv.WriteFile(t, dir, "data/tls.crt", cert)
		},
		"gone for a while": func(t *testing.T, dir string, cert, key []byte, between func()) {
			_ = os.Remove(filepath.Join(dir, "data"))
			between()
			to, err := os.MkdirTemp(dir, "data-")
			must(t, err)
			testenv.WriteFile(t, to, "tls.crt", cert)
			testenv.WriteFile(t, to, "tls.key", key)
			replaceLink(t, to, filepath.Join(dir, "data"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rotates(t, rotate)
		})
	}
}

func replaceLink(t *testing.T, to, link string) {
	t.Helper()
	next := link + ".next"
	must(t, os.Symlink(to, next))
	must(t, os.Rename(next, link))
}

// rotates replaces the files while clients make requests, each with new connections, and one on a lasting connection.
func rotates(t *testing.T, rotate func(t *testing.T, dir string, cert, key []byte, between func())) {
	ca, dir := testenv.NewCA(t), t.TempDir()
	first, err := os.MkdirTemp(dir, "data-")
	must(t, err)
	ca.Files(t, first)
	replaceLink(t, first, filepath.Join(dir, "data"))
	f := load(t, tlsfile.Names{Cert: filepath.Join(dir, "data/tls.crt"), Key: filepath.Join(dir, "data/tls.key")})
	addr := listener(t, f.Server())

	stays := client(t, ca)
	serial, _, err := ask(t.Context(), stays, addr)
	must(t, err)
	var asked atomic.Int64
	stop := make(chan struct{})
	var load sync.WaitGroup
	for range 3 {
		fresh := client(t, ca)
		fresh.Transport.(*http.Transport).DisableKeepAlives = true
		fresh.Transport.(*http.Transport).TLSClientConfig.ClientSessionCache = nil
		load.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, _, err := ask(t.Context(), fresh, addr); err != nil {
					t.Errorf("a request failed: %v", err)
					return
				}
				asked.Add(1)
			}
		})
	}
	// between waits until requests were answered with the current files.
	between := func() {
		at := asked.Load()
		testenv.Eventually(t, 20*time.Second, func() error {
			if asked.Load() < at+6 && !t.Failed() {
				return errors.New("no requests")
			}
			return nil
		})
	}
	between()
	var want string
	for range 2 {
		cert, key := ca.Issue(t)
		pair, err := tls.X509KeyPair(cert, key)
		must(t, err)
		want = pair.Leaf.SerialNumber.String()
		rotate(t, dir, cert, key, between)
		between()
	}
	close(stop)
	load.Wait()
	if got, _, err := ask(t.Context(), client(t, ca), addr); err != nil || got != want {
		t.Errorf("in the end the certificate is %s, want %s: %v", got, want, err)
	}
	if got, _, err := ask(t.Context(), stays, addr); err != nil || got != serial {
		t.Errorf("on the connection from before: certificate %s, want %s: %v", got, serial, err)
	}
}

// Unusable files are logged once and counted each time. The certificate's expiry is exported, and logged early
// enough. Neither contains keys.
func TestWhatIsToldOfFiles(t *testing.T) {
	t.Parallel()
	ca, dir := testenv.NewCA(t), t.TempDir()
	end := time.Now().Add(6 * 24 * time.Hour).Truncate(time.Second)
	cert, key, _ := ca.Files(t, dir, func(c *x509.Certificate) { c.NotAfter = end })
	f, out := load(t, tlsfile.Names{Cert: cert, Key: key}), &strings.Builder{}
	f.LogTo(slog.New(slog.NewJSONHandler(out, nil)))
	reg := prometheus.NewRegistry()
	reg.MustRegister(tlsfile.Collector{"http": f, "redis": nil})
	expect := func(when string, end, rejected float64) {
		t.Helper()
		for range 2 {
			if _, err := reg.Gather(); err != nil { // each gather reads the files
				t.Fatal(err)
			}
		}
		families, err := reg.Gather()
		must(t, err)
		got := []float64{
			families[0].GetMetric()[0].GetGauge().GetValue(), families[1].GetMetric()[0].GetCounter().GetValue(),
			families[0].GetMetric()[1].GetGauge().GetValue(),
		}
		if got[0] != end || got[1] != rejected || got[2] != 0 {
			t.Errorf("%s: %v, want %v, %v and 0", when, got, end, rejected)
		}
	}
	expect("at first", float64(end.Unix()), 0)
	testenv.Equal(t, "warnings of the end", strings.Count(out.String(), "ends soon"), 1)
	testenv.WriteFile(t, dir, "tls.key", []byte("not a key"))
	expect("a key that is none", float64(end.Unix()), 3)
	testenv.Equal(t, "lines about files that cannot be used", strings.Count(out.String(), "cannot be used"), 1)
	later := end.Add(24 * time.Hour * 30)
	ca.Files(t, dir, func(c *x509.Certificate) { c.NotAfter = later })
	expect("a new one", float64(later.Unix()), 3)
	for text, n := range map[string]int{"read again": 1, "ends soon": 1, "BEGIN": 0} {
		testenv.Equal(t, "lines with "+text, strings.Count(out.String(), text), n)
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
}

// A client accepts only the right server, sends its certificate, and follows changes of its files.
func TestDial(t *testing.T) {
	t.Parallel()
	ca, stranger := testenv.NewCA(t), testenv.NewCA(t)
	cert, key, caFile := ca.Files(t, t.TempDir())
	own := load(t, tlsfile.Names{Cert: cert, Key: key, CA: caFile})
	server := func(pair tls.Certificate) string {
		return listener(t, &tls.Config{
			Certificates: []tls.Certificate{pair}, ClientCAs: ca.Pool, ClientAuth: tls.RequireAndVerifyClientCert,
		})
	}
	dial := func(f *tlsfile.Files, addr string, skip bool) error {
		conn, err := f.Dial(t.Context(), "tcp", addr, skip)
		if err != nil {
			return err
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"); err != nil {
			return err
		}
		_, err = io.ReadAll(conn) // with TLS 1.3 the server refuses here
		return err
	}
	var unknown x509.UnknownAuthorityError
	good, wrongCA := server(ca.Pair(t)), server(stranger.Pair(t))
	for name, c := range map[string]struct {
		files *tlsfile.Files
		addr  string
		skip  bool
		want  any // a pointer for errors.As, nil for no error
	}{
		"good":                  {own, good, false, nil},
		"wrong CA":              {own, wrongCA, false, &unknown},
		"not verified":          {own, wrongCA, true, nil},
		"wrong host":            {own, server(ca.Pair(t, testenv.Elsewhere)), false, new(x509.HostnameError)},
		"expired":               {own, server(ca.Pair(t, testenv.Expired)), false, new(x509.CertificateInvalidError)},
		"without files":         {nil, good, false, &unknown},
		"without a certificate": {load(t, tlsfile.Names{CA: caFile}), good, false, new(*net.OpError)}, // a remote error
	} {
		err := dial(c.files, c.addr, c.skip)
		if c.want == nil && err != nil || c.want != nil && !errors.As(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	must(t, os.WriteFile(caFile, stranger.PEM, 0o600))
	if err := dial(own, good, false); !errors.As(err, &unknown) {
		t.Errorf("with another CA since: %v", err)
	}
}

var must = testenv.Must
