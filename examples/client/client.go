package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"time"
)

// Client talks to the API.
type Client struct {
	URL   string
	Token string
	HTTP  *http.Client
}

// Refused is an answer that a repeat of the request cannot change.
type Refused struct {
	Status     int    `json:"status"`
	Code       string `json:"code"`
	Title      string `json:"title"`
	Retryable  bool   `json:"retryable"`
	SafeNewKey bool   `json:"safe_new_key"`
	// RetryAfterMS is how long to wait before a retry.
	RetryAfterMS int64 `json:"retry_after_ms"`
}

func (r *Refused) Error() string {
	return fmt.Sprintf("the order was refused: %s (%s, status %d)", r.Title, r.Code, r.Status)
}

// Bounds of the pause between two attempts.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 5 * time.Second
)

// Place sends the operation, always with the same key, until its outcome is known, and returns the order. It returns a
// *Refused if the refusal is final. If ctx ends first, the outcome is not known, and the same operation must be placed
// again later, with the same key.
func (c *Client) Place(ctx context.Context, op *Operation) (json.RawMessage, error) {
	pause := firstPause
	for {
		order, err := c.post(ctx, op)
		if err == nil {
			return order, nil
		}
		wait := pause/2 + rand.N(pause/2) //nolint:gosec // spreads pauses, no secret
		var r *Refused
		if errors.As(err, &r) {
			if !r.Retryable {
				return nil, r
			}
			wait += time.Duration(r.RetryAfterMS) * time.Millisecond
		}
		// Any other error is a failed connection: the order may be placed or not, so send the same key again.
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("the outcome is not known; run again with the same journal: %w",
				errors.Join(ctx.Err(), err))
		case <-time.After(wait):
		}
		pause = min(2*pause, lastPause)
	}
}

// post is one attempt.
func (c *Client) post(ctx context.Context, op *Operation) (json.RawMessage, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL+"/orders", bytes.NewReader(op.Body))
	if err != nil {
		return nil, fmt.Errorf("make the request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", op.Key)
	req.Header.Set("Prefer", "wait=5")
	if c.Token != "" {
		req.Header.Set("Authorization", "Bearer "+c.Token)
	}
	res, err := c.HTTP.Do(req)
	if err != nil {
		return nil, fmt.Errorf("send the order: %w", err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	if err != nil {
		return nil, fmt.Errorf("read the answer: %w", err)
	}
	if res.StatusCode == http.StatusCreated {
		return body, nil
	}
	r := &Refused{Status: res.StatusCode, Code: "unknown", Title: res.Status}
	if json.Unmarshal(body, r) != nil || r.Code == "unknown" {
		// The answer of a proxy, not of the API: 5xx says nothing about the order.
		r.Retryable = res.StatusCode >= 500 || res.StatusCode == http.StatusTooManyRequests
	}
	return nil, r
}
