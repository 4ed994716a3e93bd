package cdc

import (
	"testing"
	"time"
)

// paced tells p of reads with so many messages of a size each, so far apart, and returns the last pause.
func paced(p *pace, reads, messages, size int, apart time.Duration) (pause time.Duration) {
	now := p.at
	for range reads {
		now = now.Add(apart)
		for range messages {
			p.got(size)
		}
		pause = p.pause(now)
	}
	return pause
}

func TestPace(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		messages, size int
		apart          time.Duration
		least, most    time.Duration
	}{
		"now and then":              {3, 300, 5 * time.Millisecond, 0, 0},
		"900 transactions a second": {3, 300, time.Second / 900, 0, 0},
		"1,200 a second":            {3, 300, time.Second / 1200, 890 * time.Microsecond, 910 * time.Microsecond},
		"2,000 a second":            {3, 300, time.Second / 2000, 1490 * time.Microsecond, 1510 * time.Microsecond},
		"2,000, gathered":           {12, 300, 2 * time.Millisecond, 1490 * time.Microsecond, 1510 * time.Microsecond},
		"5,000, gathered":           {60, 300, 4 * time.Millisecond, 3700 * time.Microsecond, 3800 * time.Microsecond},
		"8,000, gathered":           {96, 300, 4 * time.Millisecond, 3900 * time.Microsecond, 4100 * time.Microsecond},
		"60,000 a second":           {90, 300, 450 * time.Microsecond, 450 * time.Microsecond, 500 * time.Microsecond},
		"a backlog":                 {300, 100, 300 * time.Microsecond, pauseLeast, pauseLeast},
		"large rows":                {2, 100_000, 300 * time.Microsecond, pauseLeast, pauseLeast},
	} {
		p := newPace(time.Unix(0, 0))
		if got := paced(&p, 100, c.messages, c.size, c.apart); got < c.least || got > c.most {
			t.Errorf("%s: a pause of %v, want %v to %v", name, got, c.least, c.most)
		}
	}
}

// The first messages after a while are not kept waiting, however dense they were before.
func TestPaceAfterAWhile(t *testing.T) {
	t.Parallel()
	p := newPace(time.Unix(0, 0))
	if got := p.pause(time.Unix(0, 0)); got != 0 {
		t.Errorf("a pause of %v before the first message", got)
	}
	paced(&p, 50, 3, 300, time.Second/2000)
	if got := p.pause(p.at.Add(quiet + 1)); got != 0 {
		t.Errorf("a pause of %v with nothing to wait for", got)
	}
	if got := paced(&p, 1, 3, 300, time.Minute); got != 0 {
		t.Errorf("a pause of %v after a minute", got)
	}
}

// Where a socket holds as much as a pause is meant to gather three times over, pauses do not lengthen themselves.
func TestPacesSettle(t *testing.T) {
	t.Parallel()
	p := newPace(time.Unix(0, 0))
	pause := pauseAt
	for range 200 {
		pause = paced(&p, 1, 3*pauseMessages, 100, pause+50*time.Microsecond)
	}
	if pause != pauseLeast {
		t.Errorf("a pause of %v where data is always there", pause)
	}
}
