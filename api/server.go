package api

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"

	"posthaste/credits"
	"posthaste/idem"
	"posthaste/internal/pause"
	"posthaste/internal/shared"
	"posthaste/sql"
)

// Options configure a Server.
type Options struct {
	// Pool reaches Postgres; see sql.OrderPoolConfig. The caller closes it.
	Pool *sql.Pool
	// Probe reaches the same database for Readyz, so that checks take no connection from orders. nil: Pool. The caller
	// closes it.
	Probe *sql.Pool
	// Redis holds credits and streams, and the guard unless Guard is set; see idem.NewClient. If nil, Postgres alone
	// guards. The caller closes it.
	Redis idem.Redis
	// Guard is the guard's server. nil: Redis.
	Guard idem.Redis
	// Credits keeps the balances. nil: the credit routes answer 503.
	Credits *credits.Bank
	// Keys are the API keys that may use the API; see LoadKeys. If Keys and Tokens are nil, any client may act for any
	// user, and New warns.
	Keys *Keys
	// Tokens are the access tokens that may use the API, instead of Keys.
	Tokens *Tokens
	// RateLimit is the requests a second of an API key, or with Tokens of a user or of a service for any user. Without
	// both, all clients share it. Zero: no limit.
	RateLimit float64
	// AddressRateLimit is the requests a second of a client's address, or with IPv6 of its /64. Zero: no limit.
	AddressRateLimit float64
	// TrustedProxies are the proxies whose X-Forwarded-For is used. nil: none.
	TrustedProxies []netip.Prefix
	// Lease is how long an attempt owns its key without a heartbeat. Zero: idem.DefaultLease.
	Lease time.Duration
	// KeyMaxAge refuses older UUIDv7 keys that have no order. Zero: off.
	KeyMaxAge time.Duration
	// Logger gets state changes and failures. nil: discard.
	Logger *slog.Logger
	// Registerer gets the metrics, including the guard's. nil: none.
	Registerer prometheus.Registerer
	// Trace, if not nil, begins the span of a request. The returned request is served instead: its context carries the
	// span, its headers the trace context for events. end is called at the end of the request; the values of method and
	// route are bounded.
	Trace func(r *http.Request) (traced *http.Request, end func(method, route string, status int))
}

// Server is the public API. It is safe for concurrent use.
type Server struct {
	o      Options // with its defaults
	log    *slog.Logger
	orders *sql.Placer
	ready  shared.Look[Readiness]
	guard  *idem.Guard
	// database identifies the database of the guard's records.
	database  *sql.Incarnation
	limits    *limits[[sha256.Size]byte]
	addresses *limits[netip.Prefix]
	metrics   *metrics
	// paid counts the payments of orders by credits.
	paid   *prometheus.CounterVec
	engine *gin.Engine
	// eviction is Redis' last known policy; nil before the first check.
	eviction atomic.Pointer[string]
	// fitted is set once the schema had this binary's version.
	fitted atomic.Bool
	// refused is set while Postgres refuses the user or the password; the log has a line about it.
	refused atomic.Bool
	// failpoint does nothing outside tests.
	failpoint func(ctx context.Context, name string)
}

// New returns a server. It does no I/O. It fails for Options without a Pool, or with both Keys and Tokens.
func New(o Options) (*Server, error) {
	if o.Pool == nil {
		return nil, errors.New("api: Options.Pool is missing")
	}
	if o.Keys != nil && o.Tokens != nil {
		return nil, errors.New("api: Options has both Keys and Tokens")
	}
	o.Probe, o.Guard = cmp.Or(o.Probe, o.Pool), cmp.Or(o.Guard, o.Redis)
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	o.Lease = cmp.Or(o.Lease, idem.DefaultLease)
	s := &Server{
		o: o, log: o.Logger.With("component", "api"), orders: sql.NewPlacer(o.Pool),
		database: sql.NewIncarnation(o.Probe), metrics: newMetrics(o.Registerer), paid: newPaymentMetric(o.Registerer),
		limits: newLimits[[sha256.Size]byte](o.RateLimit), addresses: newLimits[netip.Prefix](o.AddressRateLimit),
		failpoint: func(context.Context, string) {},
	}
	s.guard = idem.New(idem.Options{
		Redis: o.Guard, Database: s.database, Lease: o.Lease, Routes: []string{routeOrders}, Logger: o.Logger,
		Registerer: o.Registerer,
	})
	s.ready.Timeout = readyTimeout
	s.ready.Read = func(ctx context.Context) (Readiness, error) { return s.Ready(ctx), nil }
	if o.Keys == nil && o.Tokens == nil {
		s.log.Warn("authentication is off: any client may act for any user", "auth", "none")
	}
	s.engine = s.routes()
	return s, nil
}

// Public returns the handler of the public listener; see NewHTTPServer. It handles HEAD as GET; the server then sends
// the header only (RFC 9110, 9.3.2).
func (s *Server) Public() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodHead {
			r = r.WithContext(r.Context()) // a copy: the server needs the original method
			r.Method = http.MethodGet
		}
		s.engine.ServeHTTP(w, r)
	})
}

// Routes, the values of the route label.
const (
	routeOrders    = "/orders"
	routeOrder     = "/orders/:id"
	routeByKey     = "/orders/by-key"
	routeWellKnown = "/.well-known/idempotency"
	routeOpenAPI   = "/openapi.yaml"
	routeDocs      = "/docs"
)

func (s *Server) routes() *gin.Engine {
	gin.SetMode(gin.ReleaseMode)
	e := gin.New()
	e.HandleMethodNotAllowed = true
	e.RedirectTrailingSlash = false
	_ = e.SetTrustedProxies(nil) // nil is always valid; clientAddress handles the trusted ones
	// The rate limit of the address comes before everything that costs more.
	e.Use(s.observe, s.recover, secure, handle(func(c *gin.Context) *problem {
		return s.addresses.check(Network(clientAddress(c.Request, s.o.TrustedProxies)))
	}))
	e.NoRoute(handle(func(*gin.Context) *problem { return &problem{kind: kindNotFound} }))
	e.NoMethod(handle(func(*gin.Context) *problem { return &problem{kind: kindMethod} }))
	e.GET(routeWellKnown, s.wellKnown)
	addDocs(e)
	orders := e.Group("/", handle(s.authenticate))
	orders.POST(routeOrders, handle(s.postOrder))
	orders.GET(routeOrders, handle(s.listOrders))
	orders.GET(routeByKey, handle(s.orderByKey))
	orders.GET(routeOrder, handle(s.getOrder))
	s.addCreditRoutes(orders)
	return e
}

// checkEvery is the interval of the checks of both servers that no request to Readyz makes.
const checkEvery = 15 * time.Second

// Run checks both servers, for the log and the metric of Redis' eviction policy, and refreshes the API keys or the keys
// of the tokens' issuer, until ctx ends. Then it returns nil.
func (s *Server) Run(ctx context.Context) error {
	var watch sync.WaitGroup
	defer watch.Wait()
	if s.o.Keys != nil {
		watch.Go(func() { s.o.Keys.run(ctx, s.log) })
	}
	if s.o.Tokens != nil {
		watch.Go(func() { s.o.Tokens.keys.run(ctx, s.log) })
	}
	s.database.Confirmed(ctx) // so that the first order does not query it
	for {
		go func() { _, _ = s.ready.Get(ctx) }() // it may outlast ctx, because others ask as well
		if pause.Tick(ctx, checkEvery) != nil {
			return nil
		}
	}
}
