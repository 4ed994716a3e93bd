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

// Layout is how streams are named. Marks record it, so events settled under another layout keep the names of their
// streams.
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

// BaseName returns the base name of a type from the name of one of its streams.
func BaseName(stream string, shards int) string {
	if shards <= 1 {
		return stream
	}
	if i := strings.LastIndexByte(stream, '.'); i >= 0 {
		return stream[:i]
	}
	return stream
}

// Stream is a stream that was published to.
type Stream struct {
	Name string
	// Base is the common part of the names of its type's streams: the name of the stream of a type that has only one.
	Base string
}

func StreamNames(list []Stream) []string {
	names := make([]string, len(list))
	for i, s := range list {
		names[i] = s.Name
	}
	return names
}

// Bases returns the base of each stream by its name.
func Bases(list []Stream) map[string]string {
	bases := make(map[string]string, len(list))
	for _, s := range list {
		bases[s.Name] = s.Base
	}
	return bases
}

// ErrLayout means that a type cannot have the requested number of streams. The text contains the reason.
var ErrLayout = errors.New("the streams per type cannot be changed")

// TakenError means that a stream of another type has the name that a stream of this type would have.
type TakenError struct {
	Stream string
	// Base is the Stream.Base of the other stream.
	Base string
}

func (e *TakenError) Error() string {
	return fmt.Sprintf("stream %q is one of those of %q: a type must not be called like a stream of another one",
		e.Stream, e.Base)
}

// PartOf returns the part that the table assigns to an aggregate: the lowest four bits of Postgres' hashtext of a text
// in UTF-8 on a little-endian server. CheckLayout of package sql verifies it.
func PartOf(aggregateID string) int {
	return int(hash(aggregateID) % Partitions)
}

// hash returns Postgres' hashtext of a text: lookup3 by Bob Jenkins.
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
