package api

import (
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"io"
	"mime"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/google/uuid"

	"posthaste/idem"
	"posthaste/internal/traceparent"
	"posthaste/sql"
)

// postOrder serves POST /orders. Nothing is stored before the guard admits the request.
func (s *Server) postOrder(c *gin.Context) {
	p, prob := s.readPlacing(c)
	if prob != nil {
		writeProblem(c, prob)
		return
	}
	res, err := s.place(c.Request.Context(), p)
	if err != nil {
		writeProblem(c, s.orderProblem(c, err))
		return
	}
	s.writeOrder(c, res)
	if res.after != nil {
		// The reply is sent now. after still belongs to the request, so that a graceful stop waits for it.
		c.Writer.Flush()
		res.after()
	}
}

// readPlacing reads and checks the request.
func (s *Server) readPlacing(c *gin.Context) (*placing, *problem) {
	h := c.Request.Header
	key, prob := parseKey(h)
	if prob != nil {
		return nil, prob
	}
	c.Header(idem.KeyHeader, h.Get(idem.KeyHeader))
	body, prob := readBody(c)
	if prob != nil {
		return nil, prob
	}
	cmd, prob := decodeCommand(body, exchangeOf(c).who)
	if prob != nil {
		return nil, prob
	}
	wait, applied := idem.ParseWait(h)
	if applied {
		c.Header("Preference-Applied", "wait="+strconv.Itoa(int(wait/time.Second)))
	}
	minted, _ := mintedAt(key)
	return &placing{
		cmd: cmd, key: OrderKey(cmd.UserID, key), fp: cmd.fingerprint(), wait: wait, expired: s.expired(key),
		headers: traceHeaders(h), minted: minted,
	}, nil
}

// OrderKey scopes a client's key to its user and to placing orders. Orders are stored under it.
func OrderKey(user uuid.UUID, key string) idem.Key {
	return idem.NewKey("", user.String(), http.MethodPost, routeOrders, key)
}

func (s *Server) expired(key string) bool {
	if s.keyMaxAge == 0 {
		return false
	}
	t, ok := mintedAt(key)
	return ok && time.Since(t) > s.keyMaxAge
}

// readBody reads the body within the limits of size and time.
func readBody(c *gin.Context) ([]byte, *problem) {
	h := c.Request.Header
	mt, params, err := mime.ParseMediaType(h.Get("Content-Type"))
	if err != nil || mt != "application/json" {
		return nil, &problem{kind: kindMediaType}
	}
	if cs, ok := params["charset"]; ok && !strings.EqualFold(cs, "utf-8") {
		return nil, &problem{kind: kindMediaType, detail: "JSON is UTF-8"}
	}
	if ce := h.Get("Content-Encoding"); ce != "" && !strings.EqualFold(ce, "identity") {
		return nil, &problem{kind: kindMediaType, detail: "the body must not be compressed"}
	}
	rc := http.NewResponseController(c.Writer)
	// A test's recorder does not support deadlines.
	_ = rc.SetReadDeadline(time.Now().Add(BodyTimeout))
	body, err := io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, MaxBody))
	// A deadline that remains would cancel the request's context during the work.
	_ = rc.SetReadDeadline(time.Time{})
	var tooLarge *http.MaxBytesError
	var ne net.Error
	switch {
	case err == nil:
		return body, nil
	case errors.As(err, &tooLarge):
		return nil, &problem{kind: kindTooLarge}
	case errors.As(err, &ne) && ne.Timeout():
		c.Header("Connection", "close")
		return nil, &problem{kind: kindSlowBody}
	default:
		c.Header("Connection", "close")
		return nil, &problem{kind: kindInvalidJSON, detail: "the body could not be read"}
	}
}

// traceHeaders returns the valid W3C trace context of the request for its event, or nil.
func traceHeaders(h http.Header) map[string]string {
	tp := h.Get("Traceparent")
	if len(tp) != traceparent.Len || !traceparent.Valid(tp) {
		return nil
	}
	out := map[string]string{"traceparent": tp}
	if ts := strings.Join(h.Values("Tracestate"), ","); ts != "" && len(ts) <= 512 && isPrintable(ts) {
		out["tracestate"] = ts
	}
	return out
}

func isPrintable(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}

// writeOrder sends the stored answer of an order with this attempt's headers.
func (s *Server) writeOrder(c *gin.Context, res placed) {
	h := c.Writer.Header()
	o := res.order
	h.Set("Idempotent-Replayed", strconv.FormatBool(res.replayed))
	h.Set("Idempotency-Expires", remembered(o.CreatedAt, s.guard.TTL()).UTC().Format(http.TimeFormat))
	if res.replayed {
		h.Set("Original-Date", o.CreatedAt.UTC().Format(http.TimeFormat))
	}
	if res.degraded {
		h.Set("Idempotency-Guard", "db")
	}
	h.Set("Cache-Control", "no-store")
	if o.Status == sql.OrderRejected {
		h.Set("Link", `</docs>; rel="describedby"`)
		write(c, o.RespStatus, problemType, o.RespBody)
		return
	}
	body := render(o)
	h.Set("Location", "/orders/"+o.ID.String())
	h.Set("ETag", etag(body))
	write(c, http.StatusCreated, jsonType, body)
}

// remembered is the time until which a key is kept at least. Postgres keeps it forever, but a date in the past would
// suggest that the key may be executed again.
func remembered(done time.Time, ttl time.Duration) time.Time {
	t := done.Add(ttl)
	if now := time.Now(); t.Before(now) {
		return now.Add(ttl)
	}
	return t
}

const jsonType = "application/json"

func etag(body []byte) string {
	sum := sha256.Sum256(body)
	return `"` + base64.RawURLEncoding.EncodeToString(sum[:12]) + `"`
}

// orderProblem maps errors to problems. Clients never see the text of an error.
func (s *Server) orderProblem(c *gin.Context, err error) *problem {
	var pe *paymentError
	switch {
	case errors.As(err, &pe):
		return s.creditProblem(c, pe.err)
	case errors.Is(err, errReused):
		return &problem{kind: kindKeyReused}
	case errors.Is(err, errExpired):
		return &problem{kind: kindKeyExpired}
	case errors.Is(err, errInProgress), errors.Is(err, sql.ErrOrderLocked):
		return &problem{kind: kindInProgress, retryAfter: time.Second}
	case errors.Is(err, sql.ErrCommitUnknown):
		s.log.Error("outcome of a commit is unknown", "request_id", exchangeOf(c).id, "err", err)
		return &problem{kind: kindUnknown, retryAfter: time.Second}
	default:
		return s.unavailable(c, err)
	}
}

// unavailable is the problem for a failure of Postgres.
func (s *Server) unavailable(c *gin.Context, err error) *problem {
	if c.Request.Context().Err() == nil { // a client that disconnected is not logged
		s.log.Warn("request cannot be served now", "request_id", exchangeOf(c).id, "err", err)
	}
	return &problem{kind: kindUnavailable, retryAfter: time.Second}
}
