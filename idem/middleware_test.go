package idem_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/gin-gonic/gin"

	"posthaste/idem"
	"posthaste/idem/ginidem"
	"posthaste/internal/lab/testenv"
)

// stacks are the two middlewares over one handler.
var stacks = map[string]func(g *idem.Guard, o idem.HTTPOptions, h http.HandlerFunc) http.Handler{
	"net/http": func(g *idem.Guard, o idem.HTTPOptions, h http.HandlerFunc) http.Handler { return g.Handler(o, h) },
	"gin": func(g *idem.Guard, o idem.HTTPOptions, h http.HandlerFunc) http.Handler {
		gin.SetMode(gin.ReleaseMode)
		e := gin.New()
		e.Use(gin.CustomRecoveryWithWriter(io.Discard, func(c *gin.Context, _ any) {
			c.AbortWithStatus(http.StatusInternalServerError)
		}))
		e.POST("/pay", ginidem.Middleware(g, o), func(c *gin.Context) { h(c.Writer, c.Request) })
		return e
	},
}

// serve starts a server whose guard has these options.
type serve func(o idem.HTTPOptions, h http.HandlerFunc) *httptest.Server

// eachStack runs a test with both. The guard's server is fresh.
func eachStack(t *testing.T, f func(t *testing.T, r *testenv.RedisServer, serve serve)) {
	t.Helper()
	t.Parallel()
	for name, stack := range stacks {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := testenv.Redis(t)
			f(t, r, func(o idem.HTTPOptions, h http.HandlerFunc) *httptest.Server {
				c, err := idem.PatientClient(r.URL())
				testenv.Must(t, err)
				t.Cleanup(func() { _ = c.Close() })
				o.Route = "/pay"
				if o.Scope == nil {
					o.Scope = func(r *http.Request) string { return r.Header.Get("User") }
				}
				g := idem.Patient(idem.New(idem.Options{Redis: c, Routes: []string{"/pay"}}))
				s := httptest.NewUnstartedServer(stack(g, o, h))
				s.Config.ErrorLog = nil
				s.Start()
				t.Cleanup(s.Close)
				return s
			})
		})
	}
}

func pay(tb testing.TB, s *httptest.Server, user, key, body string,
	headers ...string,
) (status int, header http.Header, text string) {
	tb.Helper()
	req, err := http.NewRequestWithContext(context.Background(), http.MethodPost, s.URL+"/pay", strings.NewReader(body))
	testenv.Must(tb, err)
	req.Header.Set("User", user)
	req.Header.Set(idem.KeyHeader, key)
	req.Header.Set("Prefer", "wait=10")
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	res, err := s.Client().Do(req)
	if err != nil {
		return 0, nil, err.Error()
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	testenv.Must(tb, err)
	return res.StatusCode, res.Header, string(b)
}

// paid is pay for an answer with a status and a text in it.
func paid(tb testing.TB, s *httptest.Server, want int, part, user, key, body string) {
	tb.Helper()
	status, _, text := pay(tb, s, user, key, body)
	testenv.Equal(tb, "status", status, want)
	testenv.Contains(tb, "the answer", text, part)
}

const key = "0123456789abcdef"

func TestHandlerRunsOnceAndItsResponseIsReplayed(t *testing.T) {
	eachStack(t, func(t *testing.T, _ *testenv.RedisServer, serve serve) {
		var runs atomic.Int64
		s := serve(idem.HTTPOptions{}, func(w http.ResponseWriter, r *http.Request) {
			if _, _, ok := idem.KeyFrom(r.Context()); !ok {
				t.Error("no key in the context")
			}
			n := runs.Add(1)
			body, _ := io.ReadAll(r.Body)
			w.Header().Set("Content-Type", "text/x-receipt")
			w.Header().Set("Location", "/receipts/1")
			w.Header().Set("Set-Cookie", "a=b")
			w.WriteHeader(http.StatusCreated)
			_, _ = fmt.Fprintf(w, "receipt %d\nfor %s", n, body)
		})
		const n = 50
		texts := make([]string, n)
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				status, header, text := pay(t, s, "u", key, "5 EUR")
				texts[i] = fmt.Sprint(status, header.Get("Location"), header.Get("Content-Type"), text)
				if (header.Get("Idempotent-Replayed") == "true") == (header.Get("Set-Cookie") != "") {
					t.Errorf("a cookie was replayed, or lost: %v", header)
				}
			})
		}
		wg.Wait()
		for _, text := range texts {
			if text != "201/receipts/1text/x-receiptreceipt 1\nfor 5 EUR" {
				t.Fatal(text)
			}
		}
		testenv.Equal(t, "runs", runs.Load(), 1)
		paid(t, s, 422, "idempotency_key_reused", "u", key, "6 EUR")
		paid(t, s, 201, "receipt 2", "other", key, "6 EUR")
		paid(t, s, 400, "idempotency_key_missing", "u", "", "x")
		paid(t, s, 413, "", "u", key+"2", strings.Repeat("x", 65<<10))
	})
}

func TestStoredOrReleasedByStatus(t *testing.T) {
	eachStack(t, func(t *testing.T, _ *testenv.RedisServer, serve serve) {
		var runs atomic.Int64
		s := serve(idem.HTTPOptions{}, func(w http.ResponseWriter, r *http.Request) {
			runs.Add(1)
			var status int
			_, _ = fmt.Fscan(r.Body, &status)
			switch status {
			case 0:
				panic("deliberate")
			case 1: // an unknown outcome
				idem.Unsettled(r.Context())
				status = 503
			}
			w.WriteHeader(status)
		})
		for status, stored := range map[int]bool{
			200: true, 201: true, 204: true, 302: true, 400: true, 402: true, 404: true, 409: true, 422: true,
			401: false, 403: false, 408: false, 425: false, 429: false, 500: false, 502: false, 503: false, 0: false,
		} {
			runs.Store(0)
			for range 2 {
				pay(t, s, "u", fmt.Sprintf("key-for-status-%d", status), fmt.Sprint(status))
			}
			if ran := runs.Load(); (ran == 1) != stored {
				t.Errorf("%d: ran %d times", status, ran)
			}
		}
		pay(t, s, "u", key, "1")
		if status, header, _ := pay(t, s, "u", key, "1", "Prefer", "wait=0"); status != 409 ||
			header.Get("Retry-After") != "1" {
			t.Errorf("after an unknown outcome: %d", status)
		}
	})
}

func TestLongResponsesArePointers(t *testing.T) {
	eachStack(t, func(t *testing.T, r *testenv.RedisServer, serve serve) {
		body := func(n int) string { return strings.Repeat("é", n/2) }
		s := serve(idem.HTTPOptions{
			Render: func(w http.ResponseWriter, _ *http.Request, rec idem.Record) {
				var n int
				_, _ = fmt.Sscan(rec.Ref, &n)
				w.WriteHeader(rec.Status)
				_, _ = io.WriteString(w, body(n))
			},
		}, func(w http.ResponseWriter, r *http.Request) {
			var n int
			_, _ = fmt.Fscan(r.Body, &n)
			if n > idem.DefaultMaxInline {
				idem.SetRef(r.Context(), fmt.Sprint(n))
			}
			_, _ = io.WriteString(w, body(n))
		})
		for _, n := range []int{0, 1 << 10, 16 << 10, 64 << 10, 1 << 20} {
			k := fmt.Sprintf("key-for-length-%d", n)
			for range 3 {
				if status, _, text := pay(t, s, "u", k, fmt.Sprint(n)); status != 200 || text != body(n) {
					t.Fatalf("%d: status %d, %d bytes", n, status, len(text))
				}
			}
		}
		keys, err := r.Client.Keys(t.Context(), "i:*").Result()
		if err != nil || len(keys) != 5 {
			t.Fatal(keys, err)
		}
		// A long response without a reference is not kept: its replay runs the handler again.
		s = serve(idem.HTTPOptions{}, func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, body(64<<10))
		})
		for range 2 {
			if status, header, text := pay(t, s, "u", key, "1"); status != 200 || text != body(64<<10) ||
				header.Get("Idempotent-Replayed") != "false" {
				t.Fatalf("status %d, %d bytes", status, len(text))
			}
		}
		for _, k := range r.Client.Keys(t.Context(), "i:*").Val() {
			if n := r.Client.StrLen(t.Context(), k).Val(); n > idem.DefaultMaxInline+512 {
				t.Errorf("a record of %d bytes", n)
			}
		}
	})
}

// Anonymous callers do not share keys: each would get another's response.
func TestWithoutAScopeNothingIsRun(t *testing.T) {
	eachStack(t, func(t *testing.T, _ *testenv.RedisServer, serve serve) {
		var runs atomic.Int64
		s := serve(idem.HTTPOptions{}, func(http.ResponseWriter, *http.Request) { runs.Add(1) })
		// An earlier attempt may have succeeded.
		paid(t, s, 401, `"code":"unauthorized","retryable":false,"safe_new_key":false`, "", key, "1")
		testenv.Equal(t, "runs", runs.Load(), 0)
		paid(t, s, 200, "", "u", key, "1")
	})
}

// A body that ends too early or comes too slowly is not too large: the same request may succeed later.
func TestABodyThatCannotBeRead(t *testing.T) {
	eachStack(t, func(t *testing.T, _ *testenv.RedisServer, serve serve) {
		s := serve(idem.HTTPOptions{}, func(http.ResponseWriter, *http.Request) { t.Error("it was run") })
		body := io.MultiReader(strings.NewReader("half"), iotest.ErrReader(io.ErrUnexpectedEOF))
		req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/pay", body)
		req.Header.Set("User", "u")
		req.Header.Set(idem.KeyHeader, key)
		rec := httptest.NewRecorder()
		s.Config.Handler.ServeHTTP(rec, req)
		testenv.Equal(t, "status", rec.Code, http.StatusRequestTimeout)
		testenv.Contains(t, "the answer", rec.Body.String(), `"retryable":true`)
	})
}

// A reference that a record cannot hold is dropped, and the response is kept instead: the replay is still right.
func TestAReferenceCannotForgeARecord(t *testing.T) {
	for name, ref := range map[string]string{"separator": "1|x", "line": "1\n{}\nforged", "return": "1\rx"} {
		t.Run(name, func(t *testing.T) {
			eachStack(t, func(t *testing.T, _ *testenv.RedisServer, serve serve) {
				var runs atomic.Int64
				s := serve(idem.HTTPOptions{
					Render: func(w http.ResponseWriter, _ *http.Request, rec idem.Record) {
						_, _ = fmt.Fprintf(w, "rendered %q", rec.Ref)
					},
				}, func(w http.ResponseWriter, r *http.Request) {
					runs.Add(1)
					idem.SetRef(r.Context(), ref)
					_, _ = io.WriteString(w, "receipt")
				})
				for range 2 {
					status, _, text := pay(t, s, "u", key, "1")
					testenv.Equal(t, "the answer", fmt.Sprint(status, text), "200receipt")
				}
				testenv.Equal(t, "runs", runs.Load(), 1)
			})
		})
	}
}

func TestAClientThatHangsUpDoesNotCutTheWork(t *testing.T) {
	eachStack(t, func(t *testing.T, _ *testenv.RedisServer, serve serve) {
		started, goOn := make(chan struct{}), make(chan struct{})
		var runs atomic.Int64
		s := serve(idem.HTTPOptions{}, func(w http.ResponseWriter, r *http.Request) {
			runs.Add(1)
			close(started)
			<-goOn
			testenv.ErrorIs(t, "the work's context", r.Context().Err(), nil)
			_, _ = io.WriteString(w, "done")
		})
		ctx, cancel := context.WithCancel(t.Context())
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+"/pay", strings.NewReader("x"))
			req.Header.Set("User", "u")
			req.Header.Set(idem.KeyHeader, key)
			if res, err := s.Client().Do(req); err == nil {
				_ = res.Body.Close()
				t.Error("the client was answered")
			}
		}()
		<-started
		cancel()
		<-gone
		time.AfterFunc(50*time.Millisecond, func() { close(goOn) })
		if status, header, text := pay(t, s, "u", key, "x"); status != 200 || text != "done" ||
			header.Get("Idempotent-Replayed") != "true" {
			t.Error(status, header, text)
		}
		testenv.Equal(t, "runs", runs.Load(), 1)
	})
}
