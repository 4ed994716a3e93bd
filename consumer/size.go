package consumer

import (
	"errors"
	"net"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// maxEntries bounds the entries of one read.
	maxEntries = 500
	// fewEntries bounds the entries of a read that waits: Redis cannot bound its answer by bytes.
	fewEntries = 16
	// firstBytes is about how many bytes the first read of a reader returns at most, maxBytes any read, and leastBytes
	// a read after many failures. An answer has at least one entry, of any size.
	firstBytes = 1 << 20
	maxBytes   = 4 << 20
	leastBytes = 16 << 10
	// maxPatience bounds the wait for an answer, unless the client has a longer timeout.
	maxPatience = time.Minute
	// cutAfter is how many answers in a row must be cut off before the reader reports why.
	cutAfter = 3
)

// readSize decides how much a reader requests at once. A server closes the connection if an answer exceeds its
// client-output-buffer-limit, and a slow network takes longer for a large answer than the client waits. To repeat the
// same request is then useless: the next one is half as large, and waits longer if time was the reason. Each large
// answer that arrives in good time raises the size a little.
type readSize struct {
	// entries and bytes bound a read.
	entries, bytes int
	// weight estimates the bytes of an entry, from the last answer.
	weight int
	// failures counts the answers in a row that did not arrive, patience how often the timeout was doubled.
	failures, patience int
	// timeout is the client's.
	timeout time.Duration
}

func newReadSize(window int, client redis.UniversalClient) readSize {
	return readSize{entries: max(1, min(maxEntries, window/2)), bytes: firstBytes, timeout: readTimeout(client)}
}

// readTimeout returns how long a client waits for an answer; 0 if it waits without limit.
func readTimeout(client redis.UniversalClient) time.Duration {
	switch c := client.(type) {
	case *redis.Client:
		return c.Options().ReadTimeout
	case *redis.ClusterClient:
		return c.Options().ReadTimeout
	}
	return 0
}

// least is how many entries there must be room for, so that a read is worthwhile.
func (s *readSize) least() int { return min(s.entries, fewEntries) }

// few is how many entries of each of the streams a read that waits requests.
func (s *readSize) few(streams int) int {
	n := min(s.entries, max(fewEntries/4, fewEntries*4/streams), fewEntries)
	return max(1, min(n, s.bytes/max(s.weight, 1)))
}

// received learns from an answer. It took so long; 0 means that this is not known.
func (s *readSize) received(es []*entry, took time.Duration) {
	s.failures = 0
	if len(es) == 0 {
		return
	}
	total, heaviest := 0, 0
	for _, e := range es {
		total += e.size
		heaviest = max(heaviest, e.size)
	}
	// Between the average and the heaviest: one large event among small ones should not slow the next reads down much.
	s.weight = (total/len(es) + heaviest) / 2
	if took == 0 {
		return
	}
	if 2*total >= s.bytes && (s.timeout <= 0 || took < s.timeout/4) {
		s.bytes = min(maxBytes, s.bytes+s.bytes/32+1)
	}
	if took < s.timeout/2 {
		s.patience = 0
	}
}

// failed learns that an answer has not arrived.
func (s *readSize) failed(err error) {
	s.failures++
	s.bytes = max(leastBytes, s.bytes/2)
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() {
		s.patience++
	}
}

// waits returns a client that waits as long for an answer as a request needs whose timeout was doubled so many times.
func waits(client *redis.Client, doubled int) *redis.Client {
	if t := client.Options().ReadTimeout; t > 0 && doubled > 0 {
		return client.WithTimeout(min(t<<min(doubled, 10), max(t, maxPatience)))
	}
	return client
}
