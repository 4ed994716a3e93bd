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
func (s *Server) postOrder(c *gin.Context) *problem {
	p, prob := s.readPlacing(c)
	if prob != nil {
		return prob
	}
	res, err := s.place(c.Request.Context(), p)
	if err != nil {
		return s.orderProblem(c, err)
	}
	s.writeOrder(c, res)
	if res.after != nil {
		// The reply is sent now. after still belongs to the request, so that a graceful stop waits for it.
		c.Writer.Flush()
		res.after()
	}
	return nil
}

// readPlacing reads and checks the request.
func (s *Server) readPlacing(c *gin.Context) (*placing, *problem) {
	key, body, prob := readGuarded(c)
	if prob != nil {
		return nil, prob
	}
	cmd, prob := decodeCommand(body, exchangeOf(c).who)
	if prob != nil {
		return nil, prob
	}
	wait, applied := idem.ParseWait(c.Request.Header)
	if applied {
		c.Header("Preference-Applied", "wait="+strconv.Itoa(int(wait/time.Second)))
	}
	minted := mintedAt(key)
	return &placing{
		cmd: cmd, key: OrderKey(cmd.UserID, key), fp: cmd.fingerprint(), wait: wait,
		expired: s.o.KeyMaxAge > 0 && !minted.IsZero() && time.Since(minted) > s.o.KeyMaxAge,
		headers: traceHeaders(c.Request.Header), minted: minted,
	}, nil
}

// OrderKey scopes a client's key to its user and to placing orders. Orders are stored under it.
func OrderKey(user uuid.UUID, key string) idem.Key {
	return idem.NewKey("", user.String(), http.MethodPost, routeOrders, key)
}

// readGuarded reads the idempotency key, which the response repeats, and the body.
func readGuarded(c *gin.Context) (key string, body []byte, prob *problem) {
	if key, prob = parseKey(c.Request.Header); prob != nil {
		return "", nil, prob
	}
	c.Header(idem.KeyHeader, c.Request.Header.Get(idem.KeyHeader))
	body, prob = readBody(c)
	return key, body, prob
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
	switch {
	case err == nil:
		return body, nil
	case errors.As(err, new(*http.MaxBytesError)):
		return nil, &problem{kind: kindTooLarge}
	}
	c.Header("Connection", "close")
	if late, ok := errors.AsType[net.Error](err); ok && late.Timeout() {
		return nil, &problem{kind: kindSlowBody}
	}
	return nil, &problem{kind: kindInvalidJSON, detail: "the body could not be read"}
}

// traceHeaders returns the valid W3C trace context of the request for its event, or nil.
func traceHeaders(h http.Header) map[string]string {
	tp := h.Get("Traceparent")
	if len(tp) != traceparent.Len || !traceparent.Valid(tp) {
		return nil
	}
	out := map[string]string{"traceparent": tp}
	unprintable := func(r rune) bool { return r < 0x20 || r > 0x7e }
	if ts := strings.Join(h.Values("Tracestate"), ","); ts != "" && len(ts) <= 512 &&
		!strings.ContainsFunc(ts, unprintable) {
		out["tracestate"] = ts
	}
	return out
}

// writeOrder sends the stored answer of an order with this attempt's headers.
func (s *Server) writeOrder(c *gin.Context, res placed) {
	o := res.order
	markReplay(c, res.replayed, o.CreatedAt, idem.TTL)
	if res.degraded {
		c.Header("Idempotency-Guard", "db")
	}
	if o.Status == sql.OrderRejected {
		writeRefusal(c, o.RespStatus, o.RespBody)
		return
	}
	body := render(o)
	c.Header("Location", "/orders/"+o.ID.String())
	c.Header("ETag", etag(body))
	write(c, http.StatusCreated, jsonType, body)
}

// markReplay sets the headers of a guarded answer. Its result is of the time done, and its key is kept for ttl.
func markReplay(c *gin.Context, replayed bool, done time.Time, ttl time.Duration) {
	c.Header("Cache-Control", "no-store")
	c.Header("Idempotent-Replayed", strconv.FormatBool(replayed))
	if replayed {
		c.Header("Original-Date", done.UTC().Format(http.TimeFormat))
	}
	// Postgres keeps the key forever. A date in the past would suggest that the key may be executed again.
	expires := done.Add(ttl)
	if now := time.Now(); expires.Before(now) {
		expires = now.Add(ttl)
	}
	c.Header("Idempotency-Expires", expires.UTC().Format(http.TimeFormat))
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
	case errors.Is(err, sql.ErrCommitUnknown): // whatever has ended the search for it
		s.log.Error("outcome of a commit is unknown", "request_id", exchangeOf(c).id, "err", err)
		return &problem{kind: kindUnknown, retryAfter: time.Second}
	case errors.Is(err, errInProgress), errors.Is(err, sql.ErrOrderLocked):
		return &problem{kind: kindInProgress, retryAfter: time.Second}
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

func parseKey(h http.Header) (string, *problem) {
	key, err := idem.ParseKey(h)
	switch {
	case err == nil:
		return key, nil
	case errors.Is(err, idem.ErrKeyMissing):
		return "", &problem{kind: kindKeyMissing}
	default:
		return "", &problem{kind: kindKeyInvalid, detail: err.Error()}
	}
}

// mintedAt returns the time in a key that is a UUIDv7, otherwise zero.
func mintedAt(key string) time.Time {
	id, ok := uuidOf(key)
	if !ok || id.Version() != 7 {
		return time.Time{}
	}
	sec, nsec := id.Time().UnixTime()
	return time.Unix(sec, nsec)
}
