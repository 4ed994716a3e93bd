package jetstream

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/url"
	"strings"

	"posthaste/outbox"
)

// maxName bounds names of streams, and maxToken a token of a subject. Longer ones end with a digest.
const (
	maxName  = 180
	maxToken = 400
)

// StreamName returns the name of the JetStream stream of a stream of the outbox: OUTBOX_ORDER for outbox.order. Lower
// case letters become upper case, and a dot an underscore. Each byte that is not a lower case letter, a digit or a dot
// becomes a hyphen and two hexadecimal digits, so two streams never have the same name.
func StreamName(stream string) string {
	var b strings.Builder
	for i := range len(stream) {
		switch c := stream[i]; {
		case 'a' <= c && c <= 'z':
			b.WriteByte(c - 'a' + 'A')
		case '0' <= c && c <= '9':
			b.WriteByte(c)
		case c == '.':
			b.WriteByte('_')
		default:
			fmt.Fprintf(&b, "-%02X", c)
		}
	}
	return shorten(b.String(), maxName, "--", stream)
}

// ConsumerName returns the name of the durable consumer of a group. GroupName is its inverse.
func ConsumerName(group string) string { return escape(group, '=') }

// GroupName returns the group of a durable consumer.
func GroupName(consumer string) string {
	group, err := url.PathUnescape(strings.ReplaceAll(consumer, "=", "%"))
	if err != nil || strings.Contains(consumer, "%") { // posthaste has not made it
		return consumer
	}
	return group
}

// EventSubject returns the subject of the events of an aggregate: that of the stream and one token. The token of an
// empty aggregate id is a percent sign.
func EventSubject(stream, aggregate string) string {
	return subjectOf(stream) + "." + aggregateToken(aggregate)
}

// EventsFilter returns the subject that matches all events of a stream, and no gate.
func EventsFilter(stream string) string { return subjectOf(stream) + ".*" }

func aggregateToken(aggregate string) string {
	if aggregate == "" {
		return "%"
	}
	return shorten(escape(aggregate, '%'), maxToken, "%-", aggregate)
}

// subjectOf returns the subject that the events of a stream begin with. The dots in the name separate tokens, except
// for those that would make an empty one.
func subjectOf(stream string) string {
	tokens := strings.Split(stream, ".")
	var b strings.Builder
	for i, t := range tokens {
		switch {
		case i == 0:
		case t == "" || tokens[i-1] == "":
			b.WriteString("%2E")
		default:
			b.WriteByte('.')
		}
		b.WriteString(escape(t, '%'))
	}
	return shorten(b.String(), maxToken, "%-", stream)
}

// escape replaces each byte that is not a letter, a digit, a hyphen or an underscore by mark and two digits.
func escape(s string, mark byte) string {
	return encode(s, mark, func(c byte) bool {
		return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_'
	})
}

// encode replaces each byte that is not plain by mark and two digits.
func encode(s string, mark byte, plain func(c byte) bool) string {
	at := 0
	for at < len(s) && plain(s[at]) {
		at++
	}
	if at == len(s) {
		return s
	}
	var b strings.Builder
	b.WriteString(s[:at])
	for ; at < len(s); at++ {
		if plain(s[at]) {
			b.WriteByte(s[at])
		} else {
			fmt.Fprintf(&b, "%c%02X", mark, s[at])
		}
	}
	return b.String()
}

// shorten replaces the end of a long name by a digest of the original. No escape begins with mark.
func shorten(name string, most int, mark, original string) string {
	if len(name) <= most {
		return name
	}
	sum := sha256.Sum256([]byte(original))
	return strings.TrimRight(name[:most/2], ".") + mark + hex.EncodeToString(sum[:])
}

// gateRoot is what the subjects of all gates begin with.
const gateRoot = "posthaste-gate."

// newGate returns the gate's subject of a new stream, without the lane.
func newGate(stream string) string {
	return gateRoot + StreamName(stream) + "." + rand.Text()
}

// lanes are the names of all lanes, and ownerLane is the subject of the owner.
var lanes = func() []string {
	list := []string{outbox.Lane{Part: outbox.StreamLane}.Name(), outbox.Lane{Part: outbox.RestoreLane}.Name()}
	for part := range outbox.Partitions {
		list = append(list, outbox.Lane{Part: part}.Name())
	}
	return list
}()

const (
	ownerLane  = "owner"
	recallLane = "recalled"
)
