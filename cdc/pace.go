package cdc

import "time"

const (
	// dense is how close together messages come, on average, when it pays to wait for more of them: as with a thousand
	// transactions of one row a second.
	dense = time.Second / 3000
	// A pause is the longer the more messages come, because what it saves is worth the more the busier the servers are:
	// pauseAt where they come pauseDense apart.
	pauseDense = time.Second / 6000
	pauseAt    = 1500 * time.Microsecond
	// pauseMessages is how many messages a pause is meant to gather, at most. A Unix socket holds about three times as
	// many, and then the server waits for us. Were they more than it holds, the pauses themselves would keep them
	// apart, and grow. So the longest pause is one of 5 ms, where 20,000 messages come a second.
	pauseMessages = 96
	// pauseBytes is what a read brings when little more would come by waiting: a good part of a socket's buffer.
	pauseBytes = 64 << 10
	// pauseLeast is the shortest pause. (Where nothing else is to be done, the Go runtime makes a millisecond of it.)
	pauseLeast = 200 * time.Microsecond
	// quiet is how long nothing has come when the next message is waited for without a pause.
	quiet = time.Millisecond
)

// pace decides how long to wait before the next read. The server makes one send per message; waking up for each, and
// publishing each by itself, costs many times what its decoding does. So some are gathered where they come often, and
// each is taken at once where they do not.
type pace struct {
	// every is the mean time between messages, of late.
	every time.Duration
	// messages and bytes came since at, when what was there before was dealt with.
	messages, bytes int
	at              time.Time
}

func newPace(now time.Time) pace { return pace{every: 2 * dense, at: now} }

// got counts a message.
func (p *pace) got(bytes int) {
	p.messages++
	p.bytes += bytes
}

// pause is called when all that was read is dealt with, and returns how long to wait before the next read.
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
