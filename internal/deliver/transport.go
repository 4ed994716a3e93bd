package deliver

import (
	"crypto/tls"
	"net/http"
	"sync"

	"posthaste/internal/tlsfile"
)

// transport connects with the certificates that the files have now. The environment may name a proxy, as for net/http.
type transport struct {
	files *tlsfile.Files

	mu     sync.Mutex
	config *tls.Config
	// current uses config.
	current *http.Transport
}

// RoundTrip implements http.RoundTripper.
func (t *transport) RoundTrip(r *http.Request) (*http.Response, error) {
	return t.latest().RoundTrip(r)
}

func (t *transport) latest() *http.Transport {
	t.mu.Lock()
	defer t.mu.Unlock()
	config := t.files.Client()
	if config == t.config {
		return t.current
	}
	if t.current != nil {
		t.current.CloseIdleConnections() // others close when they have been idle for a while
	}
	t.config, t.current = config, http.DefaultTransport.(*http.Transport).Clone()
	t.current.TLSClientConfig = config.Clone() // the transport changes it
	t.current.MaxIdleConnsPerHost = 16
	t.current.MaxResponseHeaderBytes = 64 << 10
	return t.current
}
