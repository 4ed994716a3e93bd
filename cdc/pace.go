package cdc

import "time"

const (
	// dense is how close together messages come, on average, when it pays to wait for more of them: as with a thousand
	// transactions of one row a second.
	dense = time.Second / 3000
	// pauseMessages is how many messages a pause is meant to gather. A Unix socket holds about three times as many, and
	// then the server waits for us. Were they more than it holds, the pauses themselves would keep the messages apart,
	// and grow.
	pauseMessages = 96
	// pauseBytes is what a read brings when little more would come by waiting: a good part of a socket's buffer.
	pauseBytes = 64 << 10
	// pauseLeast and pauseMost bound a pause. The most is what an event may be late for the sake of others.
	pauseLeast = 200 * time.Microsecond
	pauseMost  = time.Millisecond
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
	case p.every > dense, now.Sub(p.at) > pauseMost:
		return 0
	case much:
		return pauseLeast
	default:
		return min(max(pauseMessages*p.every, pauseLeast), pauseMost)
	}
}
