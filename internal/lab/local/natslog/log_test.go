package natslog_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/local/natslog"
	"posthaste/internal/lab/testenv"
	"posthaste/sink/jetstream"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

// A log returns the events of a stream, as they are after other clients have changed it.
func TestLog(t *testing.T) {
	t.Parallel()
	l, err := natslog.Open(testenv.Nats(t).URL())
	testenv.Must(t, err)
	t.Cleanup(l.Close)
	ctx := t.Context()
	const stream = "outbox.a"
	is := func(what string, list []redis.XMessage, err error, want ...string) {
		t.Helper()
		got := []string{}
		for _, e := range list {
			got = append(got, fmt.Sprint(e.Values["id"], e.Values["subject"], e.Values["type"], e.Values["data"]))
		}
		if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %q, %v; want %q", what, got, err, want)
		}
	}
	list, err := l.Range(ctx, stream, "-", 9)
	is("without a stream", list, err)
	testenv.Must(t, l.Make(ctx, stream))
	var batch []*nats.Msg
	for _, id := range []string{"1", "2", "3"} {
		batch = append(batch, &nats.Msg{
			Subject: jetstream.EventSubject(stream, "a b"), Data: []byte("d"),
			Header: nats.Header{"ce-id": {id}, "ce-subject": {"a%20b"}, "ce-type": {"t"}},
		})
	}
	testenv.Must(t, l.Batch(ctx, batch))
	batch[0].Header.Set("Nats-Expected-Last-Subject-Sequence", "99")
	if err := l.Batch(ctx, batch); err == nil {
		t.Error("a batch that the server refuses is no error")
	}
	list, err = l.Range(ctx, stream, "-", 2)
	is("from the start", list, err, "1a btd", "2a btd")
	second := list[1]
	list, err = l.Range(ctx, stream, second.ID, 9)
	is("from an entry", list, err, "2a btd", "3a btd")
	list, err = l.Range(ctx, stream, "("+second.ID, 9)
	is("after an entry", list, err, "3a btd")
	testenv.Must(t, l.Add(ctx, stream, second))
	testenv.Must(t, l.Remove(ctx, stream, second.ID))
	list, err = l.Newest(ctx, stream, "+", 2)
	is("the newest", list, err, "2a btd", "3a btd")
	if n, err := l.Len(ctx, stream); n != 3 || err != nil {
		t.Errorf("%d events, %v", n, err)
	}
}
