package cdc

import "time"

const (
	// dense is the mean distance of messages below which a pause pays, as with a thousand transactions of one row a
	// second.
	dense = time.Second / 3000
	// The pause is longer the more messages arrive, because it saves more on busy servers: it is pauseAt if messages
	// arrive pauseDense apart.
	pauseDense = time.Second / 6000
	pauseAt    = 1500 * time.Microsecond
	// pauseMessages bounds the messages that a pause collects. A Unix socket holds about three times as many, and then
	// the server waits. With more than the socket holds, the pauses themselves would delay messages and become longer.
	// So the longest pause is 5 ms, at 20,000 messages a second.
	pauseMessages = 96
	// pauseBytes is a read so large, a good part of a socket's buffer, that waiting would add little.
	pauseBytes = 64 << 10
	// pauseLeast is the shortest pause. (In an idle process the Go runtime extends it to a millisecond.)
	pauseLeast = 200 * time.Microsecond
	// quiet is how long no message must have arrived for the next read to wait without a pause.
	quiet = time.Millisecond
)

// pace decides how long to wait before the next read. The server sends each message separately, and handling and
// publishing each separately costs many times its decoding. So frequent messages are collected, and rare ones are read
// at once.
type pace struct {
	// every is the recent mean time between messages.
	every time.Duration
	// messages and bytes arrived since at, when all earlier ones had been handled.
	messages, bytes int
	at              time.Time
}

func newPace(now time.Time) pace { return pace{every: 2 * dense, at: now} }

// got counts a message.
func (p *pace) got(bytes int) {
	p.messages++
	p.bytes += bytes
}

// pause returns how long to wait before the next read. It is called when everything read has been handled.
func (p *pace) pause(now time.Time) time.Duration {
	much := p.bytes >= pauseBytes
	if p.messages > 0 {
		p.every += (now.Sub(p.at)/time.Duration(p.messages) - p.every) / 8
		p.at, p.messages, p.bytes = now, 0, 0
	}
	switch {
	case p.every > dense, now.Sub(p.at) > quiet:
		return 0
	case much:
		return pauseLeast
	default:
		every := max(p.every, 1)
		return max(min(pauseAt*pauseDense/every, pauseMessages*every), pauseLeast)
	}
}
