package webhook

import (
	"context"
	"crypto/hmac"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	// tolerance is how far a timestamp may be off; it limits how long a recorded request can be replayed.
	tolerance = 5 * time.Minute
	// maxBody is the largest body that is read: the largest payload, and its envelope.
	maxBody = 9 << 20
)

// Delivery is a request that Receiver has verified.
type Delivery struct {
	// ID is the same in every delivery of the event: deduplicate by it.
	ID, Type, Subject string
	Time              time.Time
	Data              json.RawMessage
}

// Receiver is the warehouse's side: it verifies the signature and the age of each request and passes it to accept. If
// accept returns nil, it answers 204. If accept returns an error, it answers 503, and the sender retries.
func Receiver(secret []byte, accept func(ctx context.Context, d Delivery) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			w.Header().Set("Allow", http.MethodPost)
			http.Error(w, "post events here", http.StatusMethodNotAllowed)
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
		var tooLarge *http.MaxBytesError
		switch {
		case errors.As(err, &tooLarge):
			http.Error(w, "too large", http.StatusRequestEntityTooLarge)
			return
		case err != nil:
			http.Error(w, "the body ended early", http.StatusRequestTimeout) // the sender retries
			return
		}
		if !verify(secret, r.Header, body, time.Now()) {
			http.Error(w, "the signature is not valid", http.StatusUnauthorized)
			return
		}
		var m message
		if err := json.Unmarshal(body, &m); err != nil || m.ID != r.Header.Get(headerID) {
			http.Error(w, "the body is not an event", http.StatusBadRequest)
			return
		}
		if err := accept(r.Context(), Delivery(m)); err != nil {
			http.Error(w, "not now", http.StatusServiceUnavailable)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
}

// verify checks the signature and the age of a request. There may be several signatures while a secret is rotated.
func verify(secret []byte, h http.Header, body []byte, now time.Time) bool {
	stamp := h.Get(headerTimestamp)
	sec, err := strconv.ParseInt(stamp, 10, 64)
	if err != nil || now.Sub(time.Unix(sec, 0)).Abs() > tolerance {
		return false
	}
	want := []byte(sign(secret, h.Get(headerID), stamp, body))
	for _, s := range strings.Fields(h.Get(headerSignature)) {
		if got, ok := strings.CutPrefix(s, "v1,"); ok && hmac.Equal([]byte(got), want) {
			return true
		}
	}
	return false
}
