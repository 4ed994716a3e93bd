package shadow

import (
	"math"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Bounds of what a ledger keeps. A repetition is found among the newest keepPublished events of the streams.
const (
	keepPublished = 1_000_000
	keepFindings  = 20
)

// Finding is one broken promise of the observed relay.
type Finding struct {
	// What is lost, repeated or reordered.
	What string `json:"what"`
	// Event is the event's id, Key the value of the key's column.
	Event string `json:"event"`
	Key   string `json:"key,omitempty"`
	// Stream and Entry are where the event is, "" if it is lost.
	Stream string    `json:"stream,omitempty"`
	Entry  string    `json:"entry,omitempty"`
	At     time.Time `json:"at"`
}

// Counts are the results of a comparison, in events.
type Counts struct {
	// Committed are the rows seen in the table; Published are those of them that are in a stream.
	Committed int `json:"committed"`
	Published int `json:"published"`
	// Waiting are not in a stream yet, and were committed less than the grace before the streams were last read.
	Waiting int `json:"waiting"`
	// Lost are not in a stream although they were committed earlier.
	Lost int `json:"lost"`
	// Repeated counts the entries of events that a stream had already.
	Repeated int `json:"repeated"`
	// Reordered are in a stream in another order than their commits; only events of one key are compared.
	Reordered int `json:"reordered"`
	// Unknown are the entries without a row: it was written before the comparison began, or never committed.
	Unknown int `json:"unknown"`
	// Unreadable are the entries without an event's id.
	Unreadable int `json:"unreadable"`
}

// event is an event of the table, of a stream, or of both.
type event struct {
	key       string
	row       int // its number in the order of the commits, from 1; 0 if no row was seen
	committed time.Time
	stream    string // "" if it is in no stream
	entry     string
	place     int // its number in the stream
	published time.Time
}

// ledger compares rows with entries, in whichever order they are seen. It is safe for concurrent use.
type ledger struct {
	mu       sync.Mutex
	events   map[string]*event
	rows     int
	places   map[string]int // by stream
	newest   map[[2]string]*event
	done     []string // published events, the oldest first
	counts   Counts
	findings []Finding
	latency  histogram
}

func newLedger() *ledger {
	return &ledger{events: map[string]*event{}, places: map[string]int{}, newest: map[[2]string]*event{}}
}

// row notes a committed row. A row that is seen again is ignored.
func (l *ledger) row(id, key string, at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.events[id]
	if e == nil {
		e = &event{}
		l.events[id] = e
	}
	if e.row > 0 {
		return
	}
	l.rows++
	l.counts.Committed++
	e.row, e.key, e.committed = l.rows, key, at
	if e.stream != "" {
		l.counts.Unknown--
		l.match(id, e)
	}
}

// entry notes an entry of a stream.
func (l *ledger) entry(id, stream, entry string, at time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.places[stream]++
	e := l.events[id]
	switch {
	case id == "":
		l.counts.Unreadable++
		return
	case e == nil:
		e = &event{}
		l.events[id] = e
	case e.stream != "" && e.stream != stream: // the relay publishes to several streams
		return
	case e.stream != "":
		l.counts.Repeated++
		l.find("repeated", id, &event{key: e.key, stream: stream, entry: entry, published: at})
		return
	}
	e.stream, e.entry, e.place, e.published = stream, entry, l.places[stream], at
	if l.done = append(l.done, id); len(l.done) > keepPublished {
		old := l.events[l.done[0]]
		delete(l.events, l.done[0])
		if k := [2]string{old.stream, old.key}; l.newest[k] == old {
			delete(l.newest, k)
		}
		l.done = l.done[1:]
	}
	if e.row == 0 {
		l.counts.Unknown++
		return
	}
	l.match(id, e)
}

// match compares an event that has a row and an entry with the newest such event of its key.
func (l *ledger) match(id string, e *event) {
	l.counts.Published++
	l.latency.add(e.published.Sub(e.committed))
	if e.key == "" {
		return
	}
	k := [2]string{e.stream, e.key}
	last := l.newest[k]
	if last != nil && (e.row < last.row) != (e.place < last.place) {
		l.counts.Reordered++
		l.find("reordered", id, e)
	}
	if last == nil || e.row > last.row {
		l.newest[k] = e
	}
}

func (l *ledger) find(what, id string, e *event) {
	if len(l.findings) < keepFindings {
		l.findings = append(l.findings, Finding{what, id, e.key, e.stream, e.entry, e.published})
	}
}

// result returns the counts, and the first findings; lost events come last. At read, every stream was read to its end.
func (l *ledger) result(read time.Time, grace time.Duration) (Counts, []Finding) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c, findings := l.counts, l.findings[:len(l.findings):len(l.findings)]
	if c.Committed > c.Published {
		for id, e := range l.events {
			switch {
			case e.row == 0 || e.stream != "":
			case read.Sub(e.committed) < grace:
				c.Waiting++
			default:
				c.Lost++
				if len(findings) < keepFindings {
					findings = append(findings, Finding{What: "lost", Event: id, Key: e.key, At: e.committed})
				}
			}
		}
	}
	return c, findings
}

// percentile returns the latency that a part q of the events does not exceed, or 0 without events.
func (l *ledger) percentile(q float64) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.latency.percentile(q)
}

// histogram counts durations, in steps of 5 %.
type histogram struct {
	steps [400]int
	all   int
}

const step = 1.05

func (h *histogram) add(d time.Duration) {
	us := max(1, float64(d)/float64(time.Microsecond))
	h.steps[min(len(h.steps)-1, int(math.Log(us)/math.Log(step)))]++
	h.all++
}

func (h *histogram) percentile(q float64) time.Duration {
	left := int(math.Ceil(q * float64(h.all)))
	for i, n := range h.steps {
		if left -= n; left <= 0 && h.all > 0 {
			return time.Duration(math.Pow(step, float64(i+1)) * float64(time.Microsecond))
		}
	}
	return 0
}

// entryTime returns the middle of the millisecond in the id of an entry, and whether Redis chose the id at about now.
func entryTime(id string, now time.Time) (time.Time, bool) {
	text, _, found := strings.Cut(id, "-")
	ms, err := strconv.ParseInt(text, 10, 64)
	at := time.UnixMilli(ms).Add(time.Millisecond / 2)
	return at, found && err == nil && now.Sub(at).Abs() < time.Hour
}
