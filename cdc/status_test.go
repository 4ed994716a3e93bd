package cdc

import (
	"encoding/hex"
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
		{0, false, "6400000026" + "72" + "0000000100000002" + "0000000000000000" + "0000000000000000" + "00000000000f4240" + "00"},
		{1 << 32, true, "6400000026" + "72" + "0000000100000002" + "0000000100000000" + "0000000100000000" + "00000000000f4240" + "01"},
	} {
		m := encodeStatus(1<<32|2, outbox.LSN(c.flush), at, c.reply)
		if got := hex.EncodeToString(m[:]); got != c.want {
			t.Errorf("flush %d: got %s, want %s", c.flush, got, c.want)
		}
	}
}
