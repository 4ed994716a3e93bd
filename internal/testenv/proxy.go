package testenv

import (
	"fmt"
	"strings"
	"testing"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/Shopify/toxiproxy/v2/toxics"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"posthaste/internal/local"
)

// Proxy is between a client and a server and injects network faults.
type Proxy struct {
	tb    testing.TB
	proxy *toxiproxy.Proxy
}

// NewProxy starts a proxy for upstream ("host:port").
func NewProxy(tb testing.TB, upstream string) *Proxy {
	tb.Helper()
	port, hold, err := local.ReservePort()
	if err != nil {
		tb.Fatal(err)
	}
	srv := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(prometheus.NewRegistry()), zerolog.Nop())
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	p := &Proxy{tb: tb, proxy: toxiproxy.NewProxy(srv, strings.ReplaceAll(tb.Name(), "/", "_"), addr, upstream)}
	p.Up()
	tb.Cleanup(func() { p.proxy.Stop(); _ = hold.Close() })
	return p
}

// Addr returns the address to connect to. It does not change over Down and Up.
func (p *Proxy) Addr() string { return p.proxy.Listen }

// Up accepts connections (again).
func (p *Proxy) Up() {
	p.tb.Helper()
	if err := p.proxy.Start(); err != nil {
		p.tb.Fatalf("start proxy: %v", err)
	}
}

// Down cuts every connection and refuses new ones.
func (p *Proxy) Down() { p.proxy.Stop() }

// Toxic adds a toxic described in toxiproxy's JSON form, for example
// {"name":"lost","type":"timeout","stream":"downstream","attributes":{"timeout":0}}: replies are lost.
func (p *Proxy) Toxic(json string) toxics.Toxic {
	p.tb.Helper()
	w, err := p.proxy.Toxics.AddToxicJson(strings.NewReader(json))
	if err != nil {
		p.tb.Fatalf("add toxic: %v", err)
	}
	return w.Toxic
}

// Remove removes the named toxic.
func (p *Proxy) Remove(name string) {
	p.tb.Helper()
	if err := p.proxy.Toxics.RemoveToxic(p.tb.Context(), name); err != nil {
		p.tb.Fatalf("remove toxic: %v", err)
	}
}
