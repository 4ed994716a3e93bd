// Package webhook is an example consumer: it posts every event to a warehouse over HTTP.
//
// The request follows the Standard Webhooks convention: the headers webhook-id (the event's id, the same in every
// delivery), webhook-timestamp (Unix seconds) and webhook-signature, "v1," and the base64 of an HMAC-SHA256 over
// "id.timestamp.body". Delivery is at least once; the receiver deduplicates by webhook-id. Receiver is the other side.
package webhook

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"posthaste/consumer"
)

// Group is the webhook's consumer group.
const Group = "webhook"

// Names of the request headers.
const (
	headerID        = "Webhook-Id"
	headerTimestamp = "Webhook-Timestamp"
	headerSignature = "Webhook-Signature"
)

// requestTimeout bounds one attempt.
const requestTimeout = 10 * time.Second

// message is the request's body.
type message struct {
	ID      string          `json:"id"`
	Type    string          `json:"type"`
	Subject string          `json:"subject"`
	Time    time.Time       `json:"time"`
	Data    json.RawMessage `json:"data"`
}

// Handler posts every event to target, signed with secret. While the target does not answer, is overloaded or reports
// that it is unavailable, the event waits. Another 5xx uses up an attempt. Any other answer except 2xx is final,
// including redirections. transport may be nil.
func Handler(target string, secret []byte, transport http.RoundTripper) (consumer.Handler, error) {
	u, err := url.Parse(target)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return nil, errors.New("webhook: the target is not an http URL")
	}
	if len(secret) < 16 {
		return nil, errors.New("webhook: the secret is shorter than 16 bytes")
	}
	client := &http.Client{
		Transport: transport, Timeout: requestTimeout,
		// The signature is valid for this target only.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return func(ctx context.Context, ev consumer.Event) error {
		return post(ctx, client, target, secret, ev)
	}, nil
}

func post(ctx context.Context, client *http.Client, target string, secret []byte, ev consumer.Event) error {
	body, err := json.Marshal(message{ev.ID, ev.Type, ev.Subject, ev.Time, ev.Data})
	if err != nil {
		return consumer.Permanent(fmt.Errorf("encode event %s: %w", ev.ID, err))
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("make the request for event %s: %w", ev.ID, err)
	}
	// A new timestamp at every attempt: the receiver refuses old ones.
	stamp := strconv.FormatInt(time.Now().Unix(), 10)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(headerID, ev.ID)
	req.Header.Set(headerTimestamp, stamp)
	req.Header.Set(headerSignature, "v1,"+sign(secret, ev.ID, stamp, body))
	if tp := consumer.TraceParent(ctx); tp != "" {
		req.Header.Set("Traceparent", tp)
	}
	resp, err := client.Do(req)
	if err != nil {
		return consumer.Unavailable(fmt.Errorf("post event %s: %w", ev.ID, withoutURL(err)))
	}
	defer resp.Body.Close()
	// Read the body so that the connection can be reused; this limit is enough.
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10))
	return outcome(ev.ID, resp.StatusCode)
}

func outcome(id string, status int) error {
	err := fmt.Errorf("post event %s: status %d", id, status)
	switch {
	case status >= 200 && status < 300:
		return nil
	case status == http.StatusTooManyRequests, status == http.StatusRequestTimeout, status == http.StatusBadGateway,
		status == http.StatusServiceUnavailable, status == http.StatusGatewayTimeout:
		return consumer.Unavailable(err)
	case status >= 500:
		return err
	}
	return consumer.Permanent(err)
}

// withoutURL drops the target from an error: it may contain credentials.
func withoutURL(err error) error {
	var ue *url.Error
	if errors.As(err, &ue) {
		return ue.Err
	}
	return err
}

// sign returns the signature of a request, in base64.
func sign(secret []byte, id, stamp string, body []byte) string {
	m := hmac.New(sha256.New, secret)
	_, _ = fmt.Fprintf(m, "%s.%s.", id, stamp) // writing to a hash never fails
	m.Write(body)
	return base64.StdEncoding.EncodeToString(m.Sum(nil))
}
