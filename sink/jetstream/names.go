package jetstream

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/url"
	"regexp"
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
	name := strings.ToUpper(encode(stream, '-', lower+digits+"."))
	return shorten(strings.ReplaceAll(name, ".", "_"), maxName, "--", stream)
}

// ConsumerName returns the name of the durable consumer of a group. GroupName is its inverse.
func ConsumerName(group string) string { return encode(group, '=', word) }

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
	return shorten(encode(aggregate, '%', word), maxToken, "%-", aggregate)
}

// subjectOf returns the subject that the events of a stream begin with. The dots in the name separate tokens, except
// for those that would make an empty one.
func subjectOf(stream string) string {
	subject := emptyToken.ReplaceAllStringFunc(encode(stream, '%', word+"."), func(dots string) string {
		return strings.Repeat("%2E", len(dots))
	})
	return shorten(subject, maxToken, "%-", stream)
}

var emptyToken = regexp.MustCompile(`^\.+|\.{2,}|\.$`)

// The bytes that encode may leave.
const (
	lower  = "abcdefghijklmnopqrstuvwxyz"
	digits = "0123456789"
	word   = lower + "ABCDEFGHIJKLMNOPQRSTUVWXYZ" + digits + "-_"
)

// encode replaces each byte that is not plain by mark and two digits.
func encode(s string, mark byte, plain string) string {
	var b strings.Builder
	written := 0
	for i := range len(s) {
		if strings.IndexByte(plain, s[i]) < 0 {
			fmt.Fprintf(&b, "%s%c%02X", s[written:i], mark, s[i])
			written = i + 1
		}
	}
	if written == 0 {
		return s
	}
	return b.String() + s[written:]
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
