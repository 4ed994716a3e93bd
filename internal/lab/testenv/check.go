package testenv

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"
)

// Equal reports a value that is not the wanted one. It does not end the test.
func Equal[T comparable](tb testing.TB, what string, got, want T) {
	tb.Helper()
	if got != want {
		tb.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// ErrorIs reports an error that is not the wanted one. It does not end the test.
func ErrorIs(tb testing.TB, what string, err, want error) {
	tb.Helper()
	if !errors.Is(err, want) {
		tb.Errorf("%s: got %v, want %v", what, err, want)
	}
}

// Contains reports a text in which a part is missing. It does not end the test.
func Contains(tb testing.TB, what, text string, parts ...string) {
	tb.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			tb.Errorf("%s: %q is not in %s", what, part, text)
		}
	}
}

// Becomes waits up to 20 s, as Eventually does, until a value is the wanted one.
func Becomes[T comparable](tb testing.TB, what string, want T, get func() T) {
	tb.Helper()
	Eventually(tb, 20*time.Second, func() error {
		got := get()
		return FailIf(got != want, "%s: got %v, want %v", what, got, want)
	})
}

// ErrorSays reports an error that lacks a part of the text, and a missing error. It does not end the test.
func ErrorSays(tb testing.TB, what string, err error, parts ...string) {
	tb.Helper()
	if err == nil {
		tb.Errorf("%s: no error", what)
		return
	}
	Contains(tb, what, err.Error(), parts...)
}

// Background runs a process until the test ends or stop is called, which returns how the process has ended.
func Background(tb testing.TB, run func(context.Context) error) (stop func() error) {
	tb.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	stop = sync.OnceValue(func() error { cancel(); return <-done })
	tb.Cleanup(func() { _ = stop() })
	return stop
}
