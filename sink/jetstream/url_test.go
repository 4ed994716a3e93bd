package jetstream_test

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"posthaste/sink/jetstream"
)

func TestParseURL(t *testing.T) {
	t.Parallel()
	o, err := jetstream.ParseURL("nats://a:1?domain=hub&creds=x, tls://b")
	if err != nil || o.URL != "nats://a:1,tls://b" || o.Domain != "hub" || len(o.Connection) != 1 {
		t.Errorf("got %+v, %v", o, err)
	}
	for _, bad := range []string{"", "redis://a", "nats://", "nats://a?domain=", "nats://a?domain=a.b", "tls://a?x=1"} {
		if _, err := jetstream.ParseURL(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// TestDomain uses a server by the domain of its JetStream. The server checks rights without the domain.
func TestDomain(t *testing.T) {
	t.Parallel()
	const denied = "$JS.API.STREAM.INFO.OUTBOX_USER"
	f := newCluster(t, 1, func(n *node) { n.Domain, n.Deny = "hub", []string{denied} })
	user := []nats.Option{nats.UserInfo("relay", "relay")}
	s, _, l := f.adopted(1, jetstream.Options{Connection: user, Domain: "hub"})
	if name, err := s.Bind(t.Context()); err != nil || name != "domain hub" {
		t.Errorf("bound to %q, %v", name, err)
	}
	events := makeEvents(30)
	f.Publish(l, events...)
	f.want(events...)
	err := second(s.Look(t.Context(), source, []string{"outbox.user"}, nil))
	if err == nil || !strings.Contains(err.Error(), denied) {
		t.Errorf("got %v, want the subject that is denied", err)
	}
	err = second(f.open(jetstream.Options{Domain: "other"}).Bind(t.Context()))
	if err == nil || !strings.Contains(err.Error(), "the domain of --sink-url") {
		t.Errorf("another domain: got %v", err)
	}
}

// TestReplicas demands more copies than there are servers.
func TestReplicas(t *testing.T) {
	t.Parallel()
	for _, nodes := range []int{1, 3} {
		s := newCluster(t, nodes).open(jetstream.Options{Replicas: 5})
		_, err := s.Bind(t.Context())
		if nodes > 1 && err == nil {
			err = s.Regroup(t.Context(), order, []string{"g"})
		}
		if err == nil || !strings.Contains(err.Error(), "cannot keep 5 copies") ||
			!strings.Contains(err.Error(), "lower --sink-replicas") {
			t.Errorf("%d servers: got %v", nodes, err)
		}
	}
}
