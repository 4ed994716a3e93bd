package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"
	"github.com/google/uuid"
	"pgregory.net/rapid"

	"posthaste/idem"
	"posthaste/internal/lab/testenv"
)

// document validates against the OpenAPI document.
type document struct {
	doc    *openapi3.T
	router routers.Router
}

func loadDocument(tb testing.TB) *document {
	tb.Helper()
	doc, err := openapi3.NewLoader().LoadFromData(openAPI)
	must(tb, err)
	must(tb, doc.Validate(context.Background()))
	r, err := gorillamux.NewRouter(doc)
	must(tb, err)
	return &document{doc, r}
}

// exchange sends a request to the handler, and checks the answer against the document. valid reports whether the
// document permits the request.
func (d *document) exchange(tb rapid.TB, h http.Handler, method, target, body string,
	header http.Header,
) (rec *httptest.ResponseRecorder, valid error) {
	tb.Helper()
	req := httptest.NewRequestWithContext(context.Background(), method, target, strings.NewReader(body))
	req.Header = header.Clone()
	rec = httptest.NewRecorder()
	h.ServeHTTP(rec, req)
	req = httptest.NewRequestWithContext(context.Background(), method, target, strings.NewReader(body))
	req.Header = header.Clone()
	route, params, err := d.router.FindRoute(req)
	if err != nil {
		return rec, err
	}
	in := &openapi3filter.RequestValidationInput{
		Request: req, PathParams: params, Route: route,
		Options: &openapi3filter.Options{
			AuthenticationFunc:    openapi3filter.NoopAuthenticationFunc,
			IncludeResponseStatus: true,
		},
	}
	valid = openapi3filter.ValidateRequest(context.Background(), in)
	out := &openapi3filter.ResponseValidationInput{
		RequestValidationInput: in, Status: rec.Code, Header: rec.Header(), Options: in.Options,
		Body: io.NopCloser(bytes.NewReader(rec.Body.Bytes())),
	}
	if err := openapi3filter.ValidateResponse(context.Background(), out); err != nil {
		tb.Fatalf("%s %s %q: the answer %d %s is not in the document: %v", method, target, body, rec.Code, rec.Body,
			err)
	}
	return rec, valid
}

var statusCode = regexp.MustCompile("^`?[a-z_]+`?$")

var kinds = []kind{
	kindNotFound, kindMethod, kindNotPlaced, kindUnauthorized, kindForbiddenUser, kindForbiddenScope, kindRateLimited,
	kindKeyMissing, kindKeyInvalid, kindMediaType, kindTooLarge, kindSlowBody, kindInvalidJSON, kindParameter,
	kindValidation, kindKeyExpired, kindKeyReused, kindInProgress, kindUnavailable, kindUnknown, kindInternal,
	kindInsufficient, kindForbidden, kindUnknownUser, kindFrozen, kindOverflow, kindBackpressure, kindNoCredits,
	kindForeignCredits, kindRecovering, kindRefunded,
}

// A client may use a new key if the outcome is final, and must not if it may still change: it would order twice.
func TestNewKeysAreSafeOnceTheOutcomeIsFinal(t *testing.T) {
	t.Parallel()
	var retryable []string
	for _, k := range kinds {
		if k.retryable {
			retryable = append(retryable, k.code)
		}
		body := (&problem{kind: k}).body("")
		undecided := []string{"unauthorized", "forbidden", "forbidden_scope", "forbidden_user", "credits_foreign"}
		if body.SafeNewKey != (!body.Retryable && !slices.Contains(undecided, k.code)) {
			t.Errorf("%s: retryable %v, safe_new_key %v", k.code, body.Retryable, body.SafeNewKey)
		}
	}
	slices.Sort(retryable)
	if got := strings.Join(slices.Compact(retryable), " "); got != "backpressure credits_store_unavailable "+
		"epoch_recovering internal_error not_found operation_in_progress outcome_unknown rate_limited request_timeout "+
		"temporarily_unavailable" {
		t.Errorf("retryable: %s", got)
	}
}

// The document and the handlers have the same routes, statuses and problem codes.
func TestTheDocumentIsComplete(t *testing.T) {
	t.Parallel()
	d := loadDocument(t)
	for _, r := range documented {
		if r.route == routeOpenAPI {
			continue
		}
		item := d.doc.Paths.Value(strings.ReplaceAll(r.route, ":id", "{id}"))
		if item == nil || item.GetOperation(r.method) == nil {
			t.Errorf("%s %s is not documented", r.method, r.route)
			continue
		}
		have := item.GetOperation(r.method).Responses.Map()
		for _, s := range r.statuses {
			if have[strconv.Itoa(s)] == nil {
				t.Errorf("%s %s: status %d is not documented", r.method, r.route, s)
			}
		}
		if len(have) != len(r.statuses) {
			t.Errorf("%s %s: %d statuses documented, %d in the code", r.method, r.route, len(have), len(r.statuses))
		}
	}
	text := string(openAPI)
	for _, k := range kinds {
		if !statusCode.MatchString(k.code) || (k.code != "method_not_allowed" &&
			!strings.Contains(text, "`"+k.code+"`")) {
			t.Errorf("code %s is not documented", k.code)
		}
	}
}

// Any valid request gets a documented answer, and any invalid one a 4xx problem.
func TestAnyRequestGetsADocumentedAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	d := loadDocument(t)
	h := w.s.Public()
	placed := json.RawMessage(w.post("a-key-that-was-used", orderJSON(1)).body)
	var known orderBody
	must(t, json.Unmarshal(placed, &known))
	rapid.Check(t, func(t *rapid.T) {
		g := generator{t, known.ID.String()}
		method, target, body, header := g.request()
		rec, invalid := d.exchange(t, h, method, target, body, header)
		switch {
		case rec.Code >= 500:
			t.Fatalf("%s %s %q: %d %s", method, target, body, rec.Code, rec.Body)
		case invalid != nil && (rec.Code < 400 || rec.Header().Get("Content-Type") != problemType):
			t.Fatalf("%s %s %q %v: %d %s although the request is invalid: %v", method, target, body, header, rec.Code,
				rec.Body, invalid)
		}
	})
}

// generator makes requests, most of them nearly valid.
type generator struct {
	t     *rapid.T
	known string
}

func (g generator) pick(label string, of ...string) string {
	return rapid.SampledFrom(of).Draw(g.t, label)
}

func (g generator) request() (method, target, body string, header http.Header) {
	header = http.Header{}
	if g.mostly("with key", "yes", "no") == "yes" {
		header.Set(idem.KeyHeader, g.mostly("key", uuid.NewString(), "a-key-that-was-used", `"a-key-that-was-used"`,
			"short", strings.Repeat("k", 255), strings.Repeat("k", 600)))
	}
	switch g.pick("route", "post", "post", "post", "get", "list", "by-key", "well-known") {
	case "post":
		header.Set("Content-Type", g.mostly("type", "application/json", "text/plain"))
		header.Set("Prefer", g.pick("prefer", "wait=0", "wait=x", "respond-async"))
		return http.MethodPost, "/orders", g.body(), header
	case "get":
		header.Set("If-None-Match", g.pick("tag", "*", `"x"`))
		return http.MethodGet, "/orders/" + g.pick("id", g.known, uuid.NewString(), "x", "%00"), "", header
	case "list":
		return http.MethodGet, "/orders?" + g.query(), "", header
	case "by-key":
		return http.MethodGet, "/orders/by-key?user_id=" + g.pick("user", testUser, uuid.NewString(), "x"), "", header
	default:
		return http.MethodGet, "/.well-known/idempotency", "", header
	}
}

func (g generator) query() string {
	q := url.Values{"user_id": {g.pick("user", testUser, uuid.NewString())}}
	if g.pick("paged", "yes", "no") == "yes" {
		q.Set("limit", g.pick("limit", "1", "200", "0", "201", "x", "-1", "1.5", "+1", "1_0"))
	}
	if g.pick("after", "yes", "no") == "yes" {
		q.Set("after", g.pick("cursor", "AAAAAAAAAAAAAAAAAAAAAA", "_____________________w", "x",
			"AAAAAAAAAAAAAAAAAAAA=="))
	}
	return q.Encode()
}

// mostly draws the valid value four times out of five, so that most requests have at most one fault.
func (g generator) mostly(label, right string, wrong ...string) string {
	if rapid.IntRange(0, 4).Draw(g.t, label+" is wrong") < 4 {
		return right
	}
	return g.pick(label, wrong...)
}

func (g generator) body() string {
	amount := strconv.FormatInt(rapid.Int64Range(1, maxAmount).Draw(g.t, "amount"), 10)
	currency := fmt.Sprintf("%q", rapid.StringMatching(`[A-Z]{3}`).Draw(g.t, "currency"))
	fields := map[string]string{
		"user_id": g.mostly("user", `"`+testUser+`"`, `"`+uuid.NewString()+`"`, `"x"`, `""`, "null", "1"),
		"amount": g.mostly("amount", amount, "999999999999999", "1000000000000000", "0", "-1", "1.5", `"1"`, "null",
			"[]",
			strconv.FormatInt(rapid.Int64().Draw(g.t, "any"), 10)),
		"currency": g.mostly("currency", currency, `"usd"`, `"US"`, `"USDT"`, "null", "{}"),
	}
	switch g.mostly("fields", "all", "more", "fewer") {
	case "more":
		fields["note"] = `"x"`
	case "fewer":
		delete(fields, g.pick("drop", "user_id", "amount", "currency"))
	}
	var parts []string
	for name, value := range fields {
		parts = append(parts, fmt.Sprintf("%q:%s", name, value))
	}
	return g.mostly("wrap", "", "[", "x") + "{" + strings.Join(parts, ",") + "}" + g.mostly("tail", "", "x", "{}")
}

func TestDocsWorkOffline(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if r := w.do("GET", "/openapi.yaml", ""); r.status != 200 || r.body != string(openAPI) {
		t.Errorf("document: %d", r.status)
	}
	page := w.do("GET", "/docs", "")
	if page.status != 200 || !strings.Contains(page.body, "/openapi.yaml") {
		t.Fatalf("page: %v", page)
	}
	assets := regexp.MustCompile(`(?:src|href)="([^"]+)"`).FindAllStringSubmatch(page.body, -1)
	if len(assets) < 3 {
		t.Errorf("assets %v", assets)
	}
	for _, a := range assets {
		if !strings.HasPrefix(a[1], "/docs/") {
			t.Errorf("%s is not ours", a[1])
			continue
		}
		if r := w.do("GET", a[1], ""); r.status != 200 || len(r.body) == 0 {
			t.Errorf("%s: %d", a[1], r.status)
		}
	}
	testenv.Equal(t, "a file that is not there", w.do("GET", "/docs/nothing.js", "").status, 404)
}
