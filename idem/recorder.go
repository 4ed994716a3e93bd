package idem

import (
	"bytes"
	"encoding/json"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// keptHeaders are the response headers that belong to the result; all others (dates, ids, cookies, limits) belong to
// one exchange and are never replayed.
var keptHeaders = []string{"Content-Type", "Location", "Etag", "Content-Language"}

type recorder struct {
	header http.Header
	status int
	wrote  bool
	body   bytes.Buffer
}

var _ http.ResponseWriter = (*recorder)(nil)

func (r *recorder) Header() http.Header { return r.header }

func (r *recorder) WriteHeader(status int) {
	if !r.wrote && status >= 200 {
		r.wrote, r.status = true, status
	}
}

func (r *recorder) Write(b []byte) (int, error) {
	r.WriteHeader(http.StatusOK)
	return r.body.Write(b)
}

func (r *recorder) send(w http.ResponseWriter) {
	h := w.Header()
	maps.Copy(h, r.header)
	if h.Get("Content-Type") == "" && r.body.Len() > 0 {
		h.Set("Content-Type", http.DetectContentType(r.body.Bytes()))
		r.header.Set("Content-Type", h.Get("Content-Type"))
	}
	h.Set("Content-Length", strconv.Itoa(r.body.Len()))
	w.WriteHeader(r.status)
	_, _ = w.Write(r.body.Bytes()) // a client that disconnected gets the response by a retry
	_ = http.NewResponseController(w).Flush()
}

// encode packs the kept headers and the body for a record; "" if that is longer than limit.
func (r *recorder) encode(limit int) string {
	kept := make(map[string][]string, len(keptHeaders))
	for _, name := range keptHeaders {
		if v := r.header.Values(name); len(v) > 0 {
			kept[name] = v
		}
	}
	head, err := json.Marshal(kept)
	if err != nil || r.body.Len() > limit {
		return ""
	}
	return string(head) + "\n" + r.body.String()
}

// decodeResponse is the inverse of encode.
func decodeResponse(payload string) (header http.Header, body string, ok bool) {
	head, body, ok := strings.Cut(payload, "\n")
	if !ok || json.Unmarshal([]byte(head), &header) != nil {
		return nil, "", false
	}
	return header, body, true
}

// refuse answers in the form of RFC 9457. If retryAfter is not zero, the same request may succeed then; otherwise only
// another key may, or another credential.
func refuse(w http.ResponseWriter, status int, code, title string, retryAfter time.Duration) {
	body := map[string]any{
		"type": "urn:posthaste:problem:" + code, "title": title, "status": status, "code": code,
		"retryable": retryAfter > 0, "safe_new_key": retryAfter == 0 && status != http.StatusUnauthorized,
	}
	h := w.Header()
	if retryAfter > 0 {
		h.Set("Retry-After", strconv.FormatInt(int64((retryAfter+time.Second-1)/time.Second), 10))
		body["retry_after_ms"] = retryAfter.Milliseconds()
	}
	b, err := json.Marshal(body)
	if err != nil {
		panic(err) // impossible: strings, numbers and booleans
	}
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(b)
}
