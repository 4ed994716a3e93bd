package outbox

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"strconv"
	"strings"
)

// ShardCounts are the numbers of streams that a type may have. Each divides Partitions, so that a part of the table is
// in one stream of a type.
var ShardCounts = []int{1, 2, 4, 8, Partitions}

// Layout is how streams are named. The marks have it: the streams of events that were settled under another layout keep
// their names.
type Layout struct {
	// Prefix is put before the aggregate type.
	Prefix string
	// Shards is how many streams a type has, one of ShardCounts.
	Shards int
}

// Stream returns the name of the stream of an aggregate. With one stream for each type it is the prefix and the type;
// with more, the remainder of the aggregate's part follows. So an aggregate is in one stream.
func (l Layout) Stream(aggregateType, aggregateID string) string {
	if l.Shards <= 1 {
		return l.Prefix + aggregateType
	}
	return l.Prefix + aggregateType + shardSuffixes[PartOf(aggregateID)%l.Shards]
}

// ShardName returns the name of one of the streams of a type, which base names.
func ShardName(base string, shard int) string { return base + shardSuffixes[shard] }

var shardSuffixes = func() (s [Partitions]string) {
	for i := range s {
		s[i] = "." + strconv.Itoa(i)
	}
	return s
}()

// BaseName is the inverse: what the streams of a type have in common, of the name of one of them.
func BaseName(stream string, shards int) string {
	if shards <= 1 {
		return stream
	}
	if i := strings.LastIndexByte(stream, '.'); i >= 0 {
		return stream[:i]
	}
	return stream
}

// Stream is one that was published to.
type Stream struct {
	Name string
	// Base is what the names of the streams of its type have in common: the name of its only one.
	Base string
}

// StreamNames are the names of streams.
func StreamNames(list []Stream) []string {
	names := make([]string, len(list))
	for i, s := range list {
		names[i] = s.Name
	}
	return names
}

// Bases tells the base of each stream by its name.
func Bases(list []Stream) map[string]string {
	bases := make(map[string]string, len(list))
	for _, s := range list {
		bases[s.Name] = s.Base
	}
	return bases
}

// ErrLayout means that a type cannot have as many streams as are asked for. The text says why.
var ErrLayout = errors.New("the streams per type cannot be changed")

// TakenError means that a stream of another type has the name that one of a type's would have.
type TakenError struct {
	Stream string
	// Base is the Stream.Base of that one.
	Base string
}

func (e *TakenError) Error() string {
	return fmt.Sprintf("stream %q is one of those of %q: a type must not be called like a stream of another one",
		e.Stream, e.Base)
}

// PartOf returns the part that the table puts an aggregate into: the lowest four bits of Postgres' hashtextextended,
// of a text in UTF-8, on a server that is little-endian. Store.CheckLayout asks the server whether it is so.
func PartOf(aggregateID string) int {
	return int(hash(aggregateID) % Partitions)
}

// hash is the lower half of what Postgres makes of a text: lookup3 by Bob Jenkins, with the seed 0.
func hash(s string) uint32 {
	a := uint32(0x9e3779b9) + uint32(len(s)) + 3923095 //nolint:gosec // as Postgres has it
	b, c := a, a
	k := []byte(s) // stays on the stack where it is short
	for ; len(k) >= 12; k = k[12:] {
		a += binary.LittleEndian.Uint32(k)
		b += binary.LittleEndian.Uint32(k[4:])
		c += binary.LittleEndian.Uint32(k[8:])
		for _, r := range [...]int{4, 6, 8, 16, 19, 4} {
			a -= c
			a ^= bits.RotateLeft32(c, r)
			c += b
			a, b, c = b, c, a
		}
	}
	var tail [12]byte
	copy(tail[:], k)
	a += binary.LittleEndian.Uint32(tail[:])
	b += binary.LittleEndian.Uint32(tail[4:])
	c += binary.LittleEndian.Uint32(tail[8:]) << 8 // its lowest byte is the length's
	for _, r := range [...]int{14, 11, 25, 16, 4, 14, 24} {
		c ^= b
		c -= bits.RotateLeft32(b, r)
		a, b, c = b, c, a
	}
	return b // what the last round made
}
