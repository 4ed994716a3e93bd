package api

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"
)

// kind is one row of the contract: the code of a problem and the client's options.
type kind struct {
	status int
	code   string
	title  string
	// retryable: the same request with the same key may succeed later.
	retryable bool
}

// safeNewKey reports that sending the operation under a new key cannot do it twice. After a refusal because of the
// credential, or by a store that an operator must look at, an earlier attempt may have succeeded.
func (k kind) safeNewKey() bool {
	return !k.retryable && k.status != http.StatusUnauthorized && k.status != http.StatusForbidden && k.status < 500
}

// The kinds of problems, in the order of the checks.
var (
	kindNotFound = kind{404, "not_found", "There is no such resource", false}
	kindMethod   = kind{405, "method_not_allowed", "The resource does not have this method", false}
	// kindNotPlaced: an attempt may still be under way.
	kindNotPlaced      = kind{404, "not_found", "No order was placed under this key, so far", true}
	kindUnauthorized   = kind{401, "unauthorized", "A valid API key or token is required", false}
	kindForbiddenUser  = kind{403, "forbidden_user", "The API key or token may not act for this user", false}
	kindForbiddenScope = kind{403, "forbidden_scope", "The API key or token is not for this", false}
	kindRateLimited    = kind{429, "rate_limited", "Too many requests", true}
	kindKeyMissing     = kind{400, "idempotency_key_missing", "The Idempotency-Key header is required", false}
	kindKeyInvalid     = kind{400, "idempotency_key_invalid", "The Idempotency-Key header is malformed", false}
	kindMediaType      = kind{415, "unsupported_media_type", "The body must be application/json", false}
	kindTooLarge       = kind{413, "body_too_large", "The body is too large", false}
	kindSlowBody       = kind{408, "request_timeout", "The body did not arrive in time", true}
	kindInvalidJSON    = kind{400, "invalid_json", "The body is not a JSON object", false}
	kindParameter      = kind{400, "invalid_parameter", "A query parameter is malformed", false}
	kindValidation     = kind{422, "validation_failed", "The request is not valid", false}
	kindKeyExpired     = kind{
		422, "idempotency_key_expired", "The key is too old, and nothing was done under it", false,
	}
	kindKeyReused   = kind{422, "idempotency_key_reused", "The key was used for another request", false}
	kindInProgress  = kind{409, "operation_in_progress", "Another attempt with this key is in progress", true}
	kindUnavailable = kind{503, "temporarily_unavailable", "Nothing was done; try again", true}
	kindUnknown     = kind{503, "outcome_unknown", "The outcome is not known yet; ask again with the same key", true}
	kindInternal    = kind{500, "internal_error", "An internal error occurred", true}
)

const problemType = "application/problem+json"

// fieldError is one fault of a body. Pointer is an RFC 6901 pointer into it.
type fieldError struct {
	Pointer string `json:"pointer"`
	Detail  string `json:"detail"`
}

type problem struct {
	kind       kind
	detail     string
	errors     []fieldError
	retryAfter time.Duration
}

// problemBody is the RFC 9457 form. Clients must ignore unknown members.
type problemBody struct {
	Type         string       `json:"type"`
	Title        string       `json:"title"`
	Status       int          `json:"status"`
	Detail       string       `json:"detail,omitempty"`
	Instance     string       `json:"instance,omitempty"`
	Code         string       `json:"code"`
	Retryable    bool         `json:"retryable"`
	SafeNewKey   bool         `json:"safe_new_key"`
	RetryAfterMS *int64       `json:"retry_after_ms,omitempty"`
	Errors       []fieldError `json:"errors,omitempty"`
}

func (p *problem) body(instance string) problemBody {
	b := problemBody{
		Type: "urn:posthaste:problem:" + p.kind.code, Title: p.kind.title, Status: p.kind.status, Detail: p.detail,
		Instance: instance, Code: p.kind.code, Retryable: p.kind.retryable, SafeNewKey: p.kind.safeNewKey(),
		Errors: p.errors,
	}
	if p.retryAfter > 0 {
		ms := p.retryAfter.Milliseconds()
		b.RetryAfterMS = &ms
	}
	return b
}

// marshal encodes a value that always encodes.
func marshal(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // impossible: strings, numbers, booleans and our own JSON
	}
	return b
}

// handle returns the handler that answers with the problem that h returns, if it returns one.
func handle(h func(c *gin.Context) *problem) gin.HandlerFunc {
	return func(c *gin.Context) {
		if p := h(c); p != nil {
			writeProblem(c, p)
		}
	}
}

// writeProblem answers with p and ends the request.
func writeProblem(c *gin.Context, p *problem) {
	h := c.Writer.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("Link", `</docs>; rel="describedby"`)
	if p.retryAfter > 0 {
		h.Set("Retry-After", strconv.FormatInt(int64((p.retryAfter+time.Second-1)/time.Second), 10))
	}
	write(c, p.kind.status, problemType, marshal(p.body("urn:uuid:"+exchangeOf(c).id)))
	c.Abort()
}

// writeRefusal sends a stored problem.
func writeRefusal(c *gin.Context, status int, body []byte) {
	c.Header("Link", `</docs>; rel="describedby"`)
	write(c, status, problemType, body)
}

// write sends a complete response.
func write(c *gin.Context, status int, contentType string, body []byte) {
	h := c.Writer.Header()
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	c.Status(status)
	_, _ = c.Writer.Write(body) // fails only if the client is gone
	exchangeOf(c).end = time.Now()
}
