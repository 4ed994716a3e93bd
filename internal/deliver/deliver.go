// Package deliver is the handler of posthaste deliver: it POSTs events to a URL, as CloudEvents in JSON, signed as
// Standard Webhooks describe. Package consumer reads, orders and retries the events.
package deliver

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/consumer"
	"posthaste/internal/outage"
	"posthaste/internal/tlsfile"
)

const (
	// maxPause bounds the pause that a receiver requests with Retry-After.
	maxPause = time.Hour
	// calm is how long no request must have failed before an outage has ended.
	calm = 10 * time.Second
	// maxBody bounds how much of a response's body is read, so that its connection can be used again.
	maxBody = 64 << 10
)

// Options configure a Sender. Group, To, Timeout and Gone are required.
type Options struct {
	// Group is the consumer group, for metrics and errors.
	Group string
	// To is the receiver's URL, http or https.
	To string
	// SecretFile has one or two secrets, one a line. Empty: requests are not signed.
	SecretFile string
	// Timeout bounds a request, until its response has been read.
	Timeout time.Duration
	// TLS has the CA of the receiver's certificate and the certificate to present. It may be nil.
	TLS *tlsfile.Files
	// Gone is called when the receiver wants no more events, possibly more than once. The events are not acknowledged.
	Gone func(error)
	// Logger may be nil.
	Logger *slog.Logger
	// Registerer may be nil.
	Registerer prometheus.Registerer
}

// Sender sends events to one receiver. It is safe for concurrent use.
type Sender struct {
	opt     Options
	client  *http.Client
	secrets secrets
	seconds *prometheus.HistogramVec
	// pausedUntil is when the receiver takes requests again, in Unix ns.
	pausedUntil atomic.Int64
	// outage is the run of failed requests, failedAt when the last one failed, in Unix ns.
	outage   outage.Run
	failedAt atomic.Int64
}

// New checks the options and reads the secrets. Its errors name the flag.
func New(opt Options) (*Sender, error) {
	u, err := url.Parse(opt.To)
	switch {
	case err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "":
		return nil, errors.New("--to: want a URL with its scheme, such as https://example.com/events")
	case u.Scheme == "http" && opt.TLS != nil:
		return nil, errors.New("--to: with --ca, --cert or --key it must begin with https://")
	case opt.Timeout <= 0:
		return nil, errors.New("--timeout must be positive")
	}
	opt.Logger = cmp.Or(opt.Logger, slog.New(slog.DiscardHandler)).With("component", "deliver", "group", opt.Group)
	s := &Sender{
		opt: opt, seconds: newSeconds(opt.Group), secrets: secrets{path: opt.SecretFile, log: opt.Logger},
		client: &http.Client{
			Transport: &transport{files: opt.TLS}, Timeout: opt.Timeout,
			// The signature and the payload are for this receiver only.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
	if opt.SecretFile != "" {
		if s.secrets.keys, err = readSecrets(opt.SecretFile); err != nil {
			return nil, fmt.Errorf("--secret-file: %w", err)
		}
	}
	if opt.Registerer != nil {
		err = opt.Registerer.Register(s.seconds)
	}
	return s, err
}

// Handle sends an event. It is a consumer.Handler.
func (s *Sender) Handle(ctx context.Context, ev consumer.Event) error {
	if pause := time.Until(time.Unix(0, s.pausedUntil.Load())); pause > 0 {
		return &unavailable{errors.New("the receiver has requested a pause"), pause}
	}
	req, err := s.request(ctx, ev)
	if err != nil {
		return consumer.Permanent(err)
	}
	began := time.Now()
	resp, err := s.client.Do(req)
	outcome, err := s.judge(ev, resp, err)
	s.seconds.WithLabelValues(s.opt.Group, outcome).Observe(time.Since(began).Seconds())
	if ctx.Err() == nil { // else this process is stopping
		s.logOutage(outcome, err)
	}
	return err
}

// request returns the signed request for an event. An error is the event's fault.
func (s *Sender) request(ctx context.Context, ev consumer.Event) (*http.Request, error) {
	if strings.ContainsFunc(ev.ID, func(c rune) bool { return c < ' ' || c > '~' }) {
		return nil, errors.New("the event's id is no value of an HTTP header")
	}
	body, err := encode(ev)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.opt.To, bytes.NewReader(body))
	if err != nil {
		return nil, withoutURL(err)
	}
	now := strconv.FormatInt(time.Now().Unix(), 10) // of this attempt: receivers refuse old ones
	req.Header.Set("Content-Type", "application/cloudevents+json")
	req.Header.Set("User-Agent", "posthaste")
	req.Header.Set("Webhook-Id", ev.ID)
	req.Header.Set("Webhook-Timestamp", now)
	if signature := s.secrets.sign(ev.ID, now, body); signature != "" {
		req.Header.Set("Webhook-Signature", signature)
	}
	if tp := consumer.TraceParent(ctx); tp != "" {
		req.Header.Set("Traceparent", tp)
	}
	return req, nil
}

// judge returns the class of a response, or of a failed request, and the error of the attempt.
func (s *Sender) judge(ev consumer.Event, resp *http.Response, err error) (outcome string, _ error) {
	if err != nil {
		return unreachable, &unavailable{withoutURL(err), 0}
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxBody))
	status := resp.StatusCode
	err = fmt.Errorf("the receiver answered %d %s", status, http.StatusText(status))
	switch {
	case status >= 200 && status < 300:
		return accepted, nil
	case status == http.StatusGone:
		err = fmt.Errorf("%w: it wants no more events. Change --to, or run posthaste groups drop --stream=%s "+
			"--group=%s", err, ev.Stream, s.opt.Group)
		s.pause(maxPause)
		s.opt.Gone(err)
		return gone, &unavailable{err, maxPause}
	case status == http.StatusRequestTimeout, status == http.StatusTooManyRequests, status >= 500:
		after := retryAfter(resp.Header.Get("Retry-After"), time.Now())
		s.pause(after)
		return busy, &unavailable{err, after}
	case status >= 300 && status < 400:
		err = fmt.Errorf("%w: redirects are not followed; --to must be the address where they lead", err)
	}
	return refused, err
}

// pause lets no request begin for d, or for longer if that was requested before. Requests that run may finish.
func (s *Sender) pause(d time.Duration) {
	if d > 0 {
		until := time.Now().Add(d).UnixNano()
		old := s.pausedUntil.Load()
		for old < until && !s.pausedUntil.CompareAndSwap(old, until) {
			old = s.pausedUntil.Load()
		}
	}
}

// logOutage logs the first failure of an outage, one line each half minute, and the end. Requests run concurrently, and
// some may succeed while others fail, so an outage ends only when no request has failed for a while.
func (s *Sender) logOutage(outcome string, err error) {
	now := time.Now().UnixNano()
	switch outcome {
	case busy, unreachable:
		s.failedAt.Store(now)
		if attrs, say := s.outage.Failed(err); say {
			s.opt.Logger.Warn("the receiver does not take events; retrying", attrs...)
		}
	case accepted:
		if now-s.failedAt.Load() < calm.Nanoseconds() {
			return
		}
		if attrs, say := s.outage.Over(); say {
			s.opt.Logger.Info("the receiver takes events again", attrs...)
		}
	}
}

// unavailable is an error that is not the event's fault.
type unavailable struct {
	error
	after time.Duration
}

// Unavailable makes package consumer retry without counting an attempt, and RetryAfter not before so long.
func (*unavailable) Unavailable() bool           { return true }
func (u *unavailable) RetryAfter() time.Duration { return u.after }

// retryAfter parses a Retry-After header, which has seconds or a date. It returns at most maxPause, and 0 for no header
// or an invalid one.
func retryAfter(header string, now time.Time) time.Duration {
	if n, err := strconv.ParseUint(header, 10, 31); err == nil {
		return min(time.Duration(n)*time.Second, maxPause)
	}
	at, err := http.ParseTime(header)
	if err != nil {
		return 0
	}
	return max(0, min(at.Sub(now), maxPause))
}

// withoutURL returns a shorter error without the URL, which may contain a secret, and without quoted text, which may
// come from the receiver.
func withoutURL(err error) error {
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err
	}
	text, _, _ := strings.Cut(err.Error(), `"`)
	return errors.New("the request failed: " + text)
}
