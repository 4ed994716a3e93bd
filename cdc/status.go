package cdc

import (
	"encoding/binary"
	"time"

	"github.com/jackc/pglogrepl"

	"posthaste/outbox"
)

// statusLen is a CopyData message with a standby status update in it: 5 bytes of frame, 34 of message.
const statusLen = 5 + 34

// encodeStatus makes the CopyData message that reports write (received) and flush (settled, also as applied). pglogrepl
// is not used because it replaces a zero flush by write, which would confirm rows that are not published. The server
// ignores a zero flush: the slot does not move.
func encodeStatus(write, flush outbox.LSN, now time.Time, reply bool) [statusLen]byte {
	var m [statusLen]byte
	m[0] = 'd'
	binary.BigEndian.PutUint32(m[1:], statusLen-1)
	m[5] = pglogrepl.StandbyStatusUpdateByteID
	binary.BigEndian.PutUint64(m[6:], uint64(write))
	binary.BigEndian.PutUint64(m[14:], uint64(flush))
	binary.BigEndian.PutUint64(m[22:], uint64(flush))
	binary.BigEndian.PutUint64(m[30:], uint64(now.UnixMicro()-y2k)) //nolint:gosec // the wire carries a signed number
	if reply {
		m[38] = 1
	}
	return m
}
