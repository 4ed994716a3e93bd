package cdc

import (
	"encoding/hex"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"posthaste/outbox"
)

func TestStatusKeepsAZeroFlush(t *testing.T) {
	t.Parallel()
	at := time.Date(2000, 1, 1, 0, 0, 1, 0, time.UTC)
	for _, c := range []struct {
		flush uint64
		reply bool
		want  string
	}{
		{0, false, "6400000026" + "72" + "0000000100000002" + "0000000000000000" + "0000000000000000" +
			"00000000000f4240" + "00"},
		{1 << 32, true, "6400000026" + "72" + "0000000100000002" + "0000000100000000" + "0000000100000000" +
			"00000000000f4240" + "01"},
	} {
		m := encodeStatus(1<<32|2, outbox.LSN(c.flush), at, c.reply)
		if got := hex.EncodeToString(m[:]); got != c.want {
			t.Errorf("flush %d: got %s, want %s", c.flush, got, c.want)
		}
	}
}

// A paused process has received nothing in the meantime. It requests a status, and gives the server time to answer.
func TestOwnStandstillIsNotTheServersSilence(t *testing.T) {
	t.Parallel()
	conn, server := net.Pipe()
	defer conn.Close()
	go func() { _, _ = io.Copy(io.Discard, server) }()
	s := &session{r: &Reader{}, conn: conn, tick: time.Minute}
	start := time.Now()
	s.heard(start)
	now := start.Add(time.Hour)
	next, err := s.housekeep(now)
	if err != nil || !s.asked || next.Sub(now) < s.tick/2 {
		t.Fatalf("after a standstill: asked %v, next look after %v, %v", s.asked, next.Sub(now), err)
	}
	if _, err := s.housekeep(next.Add(-1)); err != nil {
		t.Errorf("before its time: %v", err)
	}
	if _, err := s.housekeep(next); !errors.Is(err, errSilent) {
		t.Errorf("no answer: %v, want errSilent", err)
	}
}
