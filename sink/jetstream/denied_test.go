package jetstream_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"posthaste/outbox"
	"posthaste/sink/jetstream"
)

// TestDenied takes a right from the user. The next call that needs it names the subject and the grant, and other
// streams continue.
func TestDenied(t *testing.T) {
	t.Parallel()
	f := newCluster(t, 1, func(n *node) { n.Deny = []string{"nothing"} })
	relay := jetstream.Options{Connection: []nats.Option{nats.UserInfo("relay", "relay")}}
	s, o, l := f.adopted(1, relay)
	f.Must(s.Adopt(t.Context(), "outbox.user", o, false))
	users := s.Lane("outbox.user", o, streamLane(o))
	events := makeEvents(20)
	f.Publish(l, events[:2]...)
	publish := func() error { return second(l.Deliver(events[2:]).Publish(t.Context())) }
	look := func() error { return second(s.Look(t.Context(), source, []string{order}, nil)) }
	bind := func() error { return second(s.Bind(t.Context())) }
	adopt := func() error { return s.Adopt(t.Context(), order, f.Owner(2), false) }
	for _, c := range []struct {
		action, subject, grant string
		call                   func() error
		alone                  bool
	}{
		{"publish", "outbox.order.>", "outbox.>", publish, true},
		{"publish", "posthaste-gate.OUTBOX_ORDER.>", "posthaste-gate.>", publish, true},
		{"publish", "posthaste-gate.OUTBOX_ORDER.>", "posthaste-gate.>", adopt, true},
		{"publish", "$JS.API.DIRECT.GET.OUTBOX_ORDER", "$JS.API.>", look, true},
		{"publish", "$JS.API.INFO", "$JS.API.>", bind, false},
		{"subscribe", "_INBOX.>", "_INBOX.>", bind, false},
	} {
		n := &f.server.nodes[0]
		if n.Deny, n.Deaf = []string{c.subject}, nil; c.action == "subscribe" {
			n.Deny, n.Deaf = nil, []string{c.subject}
		}
		f.server.restart()
		err := c.call()
		var denied *jetstream.DeniedError
		if !errors.As(err, &denied) || denied.Action != c.action || denied.Grant != c.grant ||
			!strings.HasPrefix(denied.Subject, strings.TrimSuffix(c.subject, ">")) || outbox.Alone(err) != c.alone {
			t.Errorf("without %s on %q: got %v (alone: %v)", c.action, c.subject, err, outbox.Alone(err))
		}
		if c.alone {
			f.Publish(users, makeEvents(1)...)
		}
	}
	f.server.nodes[0].Deny, f.server.nodes[0].Deaf = []string{"nothing"}, nil
	f.server.restart()
	f.Must(publish())
	f.want(events...)
}
