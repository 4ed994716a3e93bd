package prove

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/lab/oracle"
	"posthaste/internal/lab/testenv"
)

const (
	yes     = oracle.Yes
	no      = oracle.No
	unknown = oracle.Unknown
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

// world is a truth with one aggregate, and a pass over its stream.
type world struct {
	t     *testing.T
	truth *oracle.Truth
	a     *oracle.Aggregate
	pass  *oracle.Pass
	next  int
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, truth: oracle.New(5, time.Now())}
	w.truth.NewAggregate("", "parcel") // so that numbers are not zero
	w.a = w.truth.NewAggregate("", "cart")
	w.pass = oracle.NewPass(w.truth)
	return w
}

// write writes n events with an outcome.
func (w *world) write(n int, o oracle.Outcome) oracle.Ref {
	first := w.truth.Open(w.a, n)
	w.truth.End(first, n, o)
	return first
}

func (w *world) lacks() bool {
	_, _, gone := w.pass.Counts()
	return gone > 0
}

func (w *world) excused(n uint32) bool {
	return w.pass.Is(oracle.Ref{Aggregate: w.a.Number, N: n}, oracle.FlagExcused)
}

// entry is that of event n.
func (w *world) entry(n uint32) oracle.Entry {
	w.next++
	r := oracle.Ref{Aggregate: w.a.Number, N: n}
	return oracle.Entry{
		At: fmt.Sprintf("%d-0", w.next), ID: w.truth.ID(r), Stream: "outbox.cart", Subject: w.a.ID,
		Type: "cart.changed", Data: string(oracle.Payload(r, "xyz")),
	}
}

// sees takes the entries of events and wants the promise that the last one breaks, "" for none.
func (w *world) sees(want string, numbers ...uint32) {
	w.t.Helper()
	for i, n := range numbers {
		b := w.pass.See(w.entry(n))
		got := ""
		if b != nil {
			got = b.Promise
		}
		if last := i == len(numbers)-1; last && got != want || !last && got != "" {
			w.t.Errorf("event %d breaks %q, want %q", n, got, want)
		}
	}
}

func TestAnIDSaysWhichEventItIs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, r := range []oracle.Ref{{N: 1}, {Aggregate: 1, N: 1}, {Aggregate: 1<<24 - 1, N: 1<<32 - 1}} {
		if got, ours := w.truth.Of(w.truth.ID(r)); !ours || got != r {
			t.Errorf("%v became %v, %v", r, got, ours)
		}
	}
	if _, ours := w.truth.Of(oracle.New(6, time.Now()).ID(oracle.Ref{Aggregate: 1, N: 1})); ours {
		t.Error("an event of another campaign is ours")
	}
	// The inbox finds the day by the version.
	testenv.Equal(t, "version", w.truth.ID(oracle.Ref{Aggregate: 1, N: 1}).Version(), 7)
}

// Each promise is found broken, and none that is kept.
func TestThePassNotices(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		write func(w *world)
		read  []uint32
		want  string
	}{
		"in order":        {func(w *world) { w.write(3, yes) }, []uint32{1, 2, 3}, ""},
		"twice":           {func(w *world) { w.write(3, yes) }, []uint32{1, 2, 2}, "duplicated"},
		"twice, later":    {func(w *world) { w.write(3, yes) }, []uint32{1, 2, 3, 1}, "duplicated"},
		"one is missing":  {func(w *world) { w.write(3, yes) }, []uint32{1, 3}, "reordered"},
		"never written":   {func(w *world) { w.write(3, yes) }, []uint32{1, 2, 3, 4}, "phantom"},
		"rolled back":     {func(w *world) { w.write(1, yes); w.write(2, no) }, []uint32{1, 2}, "phantom"},
		"over a rollback": {func(w *world) { w.write(1, yes); w.write(2, no); w.write(1, yes) }, []uint32{1, 4}, ""},
		"not answered":    {func(w *world) { w.write(1, unknown); w.write(1, yes) }, []uint32{1, 2}, ""},
		"not answered, and not there": {
			func(w *world) { w.write(1, unknown); w.write(1, yes) },
			[]uint32{2},
			"",
		},
		"not answered, and behind": {
			func(w *world) { w.write(1, unknown); w.write(1, yes) },
			[]uint32{2, 1},
			"reordered",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			c.write(w)
			w.sees(c.want, c.read...)
		})
	}
}

func TestThePassNoticesWhatIsChanged(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(e *oracle.Entry){
		"another payload":   func(e *oracle.Entry) { e.Data = strings.Replace(e.Data, "xyz", "xxz", 1) },
		"another event's":   func(e *oracle.Entry) { e.Data = strings.Replace(e.Data, `"n": 1`, `"n": 2`, 1) },
		"no JSON":           func(e *oracle.Entry) { e.Data = "{" },
		"another subject":   func(e *oracle.Entry) { e.Subject = "cart-9" },
		"another type":      func(e *oracle.Entry) { e.Type = "parcel.changed" },
		"in another stream": func(e *oracle.Entry) { e.Stream = "outbox.parcel" },
	} {
		w := newWorld(t)
		w.write(2, yes)
		e := w.entry(1)
		change(&e)
		if b := w.pass.See(e); b == nil || b.Promise != "corrupted" {
			t.Errorf("%s: %+v", name, b)
		}
	}
}

// What waits is counted from the first event that is not there, and what Redis forgets waits again.
func TestWhatWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if since, n := w.pass.Behind(); !since.IsZero() || n != 0 {
		t.Errorf("nothing is written, and %d wait since %v", n, since)
	}
	w.write(3, yes)
	w.write(1, no)
	w.write(1, unknown)
	w.sees("", 1)
	if since, n := w.pass.Behind(); since.IsZero() || n != 2 {
		t.Errorf("%d wait since %v, want 2", n, since)
	}
	e2, e3 := w.entry(2), w.entry(3)
	w.pass.See(e2)
	w.pass.See(e3)
	if since, n := w.pass.Behind(); !since.IsZero() || n != 0 || w.lacks() {
		t.Errorf("all are there, and %d wait since %v", n, since)
	}
	w.pass.Unsee(e3.ID)
	w.pass.Unsee(e2.ID)
	if _, n := w.pass.Behind(); n != 2 || !w.lacks() {
		t.Errorf("%d wait, two were forgotten", n)
	}
	w.sees("reordered", 3) // what was forgotten comes back in order, or not at all
	w.sees("", 2, 3)
	w.pass.ForgetType("parcel")
	if w.lacks() {
		t.Error("another stream was forgotten")
	}
	w.pass.ForgetType("cart")
	if _, n := w.pass.Behind(); n != 3 {
		t.Errorf("%d wait, three were forgotten", n)
	}
	w.sees("", 1, 2, 3)
	if w.lacks() {
		t.Error("all have come back")
	}
}

// What is older than --restore may stay away.
func TestWhatIsTooOldIsExcused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.write(2, yes)
	w.sees("", 1)
	now := time.Now()
	w.pass.Mark(now.Add(-oracle.ExcusedAfter - time.Minute))
	w.sees("", 2)
	w.pass.Mark(now)
	w.pass.ForgetType("cart")
	if _, n := w.pass.Behind(); n != 1 || !w.excused(1) || w.excused(2) {
		t.Errorf("%d have to come back", n)
	}
	w.sees("", 2)
}

// … and what came back before, twice as long after it was first there.
func TestWhatComesBackAgainAndAgainIsExcused(t *testing.T) {
	t.Parallel()
	const good = oracle.ExcusedForGood
	for age, excused := range map[time.Duration]bool{good: true, good - 2*time.Minute: false} {
		w := newWorld(t)
		w.write(1, yes)
		now := time.Now()
		w.sees("", 1)
		w.pass.Mark(now.Add(-age - time.Minute))
		w.pass.ForgetType("cart")
		w.pass.Mark(now.Add(-oracle.ExcusedAfter - time.Minute))
		w.sees("", 1) // it came back, not long ago
		w.pass.Mark(now)
		w.pass.ForgetType("cart")
		testenv.Equal(t, fmt.Sprintf("excused, first seen %v ago", age+time.Minute), w.excused(1), excused)
		w.sees("", 1)
	}
}

// A reader notices that Redis has gone back, and what of it nobody has done.
func TestAReaderGoesBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	rd := testenv.Redis(t)
	var broken *oracle.Breach
	forgot, may := 0, true
	r := &reader{
		stream: "outbox.cart", book: typed{w.pass, "cart"}, streams: redisStreams{rd.Client},
		broken: func(b *oracle.Breach) { broken = b },
		forgot: func() bool {
			if may {
				forgot++
			}
			return may
		},
	}
	add := func(numbers ...uint32) (ids []string) {
		t.Helper()
		for _, n := range numbers {
			e := w.entry(n)
			id, err := rd.Client.XAdd(t.Context(), &redis.XAddArgs{
				Stream: "outbox.cart",
				Values: map[string]any{"id": e.ID.String(), "subject": e.Subject, "type": e.Type, "data": e.Data},
			}).Result()
			testenv.Must(t, err)
			ids = append(ids, id)
		}
		return ids
	}
	read := func(seen, times int) {
		t.Helper()
		for range 3 {
			_, err := r.read(t.Context())
			testenv.Must(t, err)
		}
		if n, _, _ := w.pass.Counts(); broken != nil || n != seen || forgot != times {
			t.Fatalf("%d seen, forgot %d times, %+v; want %d and %d", n, forgot, broken, seen, times)
		}
	}
	w.write(6, yes)
	ids := add(1, 2, 3, 4)
	read(4, 0)
	testenv.Must(t, rd.Client.XDel(t.Context(), "outbox.cart", ids[2:]...).Err())
	read(2, 1)
	add(3, 4, 5)
	read(5, 1)
	testenv.Must(t, rd.Client.Del(t.Context(), "outbox.cart").Err())
	add(1, 2)
	read(2, 2)
	add(3, 4, 5, 6)
	read(6, 2)
	may = false
	testenv.Must(t, rd.Client.Del(t.Context(), "outbox.cart").Err())
	if _, err := r.read(t.Context()); err != nil || broken == nil || broken.Promise != "lost" {
		t.Errorf("%+v, %v", broken, err)
	}
}

// inAll returns the faults of a campaign that selects none.
func inAll(t *testing.T) []*fault {
	t.Helper()
	list, err := chooseFaults("all", false, "redis")
	testenv.Must(t, err)
	return list
}

// The same seed makes the same plan, in which every fault comes up before one comes again.
func TestThePlanIsTheSeeds(t *testing.T) {
	t.Parallel()
	faults := inAll(t)
	text := func(seed uint64) string {
		p := newPlan(seed, faults)
		var b strings.Builder
		for range 100 {
			r := p.next()
			fmt.Fprintf(&b, "%s %s %v %v", r.names(), r.Mode, r.gap, r.rest)
			for _, s := range r.Faults {
				fmt.Fprintf(&b, " %d %v", s.seed, s.hold)
			}
			if len(r.Faults) == 2 && (r.Faults[0].fault.touches == r.Faults[1].fault.touches ||
				strings.HasPrefix(r.names(), "database-") || strings.Contains(r.names(), " database-")) {
				t.Errorf("%s are no pair", r.names())
			}
		}
		return b.String()
	}
	if again := text(1); text(1) != again || text(2) == again {
		t.Error("the plan does not depend on the seed alone")
	}
	p := newPlan(3, faults)
	names := map[string]bool{}
	for range faults {
		names[p.next().Faults[0].fault.name] = true
	}
	testenv.Equal(t, "faults that came up", len(names), len(faults))
}

func TestFaultsAreChosen(t *testing.T) {
	t.Parallel()
	for names, want := range map[string]int{"all": len(faults) - 13, "relay-kill": 1, "relay-kill,link-*": 6} {
		if list, err := chooseFaults(names, false, "redis"); err != nil || len(list) != want {
			t.Errorf("%s: %d faults, %v", names, len(list), err)
		}
	}
	for _, f := range faults {
		if strings.HasPrefix(f.name, "sabotage") != (f.class == sabotage) || f.about == "" || f.touches == "" ||
			f.inject == nil {
			t.Errorf("fault %q", f.name)
		}
	}
	for fault, sink := range map[string]string{
		"nats-kill": "redis", "redis-flushall": "nats", "database-moved": "nats",
	} {
		if _, err := chooseFaults(fault, false, sink); err == nil {
			t.Errorf("%s is a fault of campaigns that publish to %s", fault, sink)
		}
	}
	if _, err := chooseFaults("relay-kill,relay-kill", false, "redis"); err == nil {
		t.Error("a fault was chosen twice")
	}
	for want, o := range map[string]Options{
		`there is no new fault "earthquake"; there are relay-kill`: {Faults: "earthquake"},
		"--duration must be at least 1s":                           {Duration: time.Millisecond},
		"--rate must be 10 to 20000":                               {Duration: time.Second, Relays: 1, Rate: 1},
	} {
		var usage *cli.UsageError
		err := o.Run(t.Context(), app.Config{}, cli.IO{})
		if !errors.As(err, &usage) || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", o, err, want)
		}
	}
}

// Readiness lies in two ways, and both are counted from when they are not allowed any more.
func TestHonesty(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := &campaign{pass: w.pass, truth: w.truth, relays: []*process{{name: "relay-0"}, {name: "relay-1"}}}
	h := &honesty{c: c}
	h.begin()
	good, bad, silent := readiness{Status: 200}, readiness{Status: 503, Reasons: []string{"redis: gone"}}, readiness{}
	now := time.Now()
	judge := func(after time.Duration, looks ...readiness) {
		h.judge(looks, now.Add(after), time.Second)
	}
	want := func(green, red float64) {
		t.Helper()
		if l := h.counted(); l.Green != green || l.Red != red {
			t.Errorf("lies %+v, want %v and %v", l, green, red)
		}
	}
	// Everything flows.
	judge(0, good, good)
	judge(redAfter-time.Second, good, bad)
	want(0, 0)
	judge(redAfter+time.Second, good, bad)
	want(0, 1)
	judge(redAfter+2*time.Second, good, good)
	want(0, 1)
	c.troubled.Store(true) // a fault is at work: it has a reason
	judge(redAfter+3*time.Second, good, bad)
	want(0, 1)
	// Nothing flows.
	w.write(1, yes)
	h.moved = now
	judge(greenAfter-time.Second, good, good)
	want(0, 1)
	judge(greenAfter+2*time.Second, good, bad)
	judge(greenAfter+3*time.Second, silent, silent)
	want(0, 1)
	judge(greenAfter+4*time.Second, good, silent)
	want(1, 1)
	h.moved = now.Add(greenAfter) // it flows again, and the event is still waiting
	judge(greenAfter+5*time.Second, good, silent)
	want(1, 1)
	h.moved = now
	if c.breach() != nil {
		t.Error("a short lie has ended the campaign")
	}
	judge(greenAfter+lieMost+time.Minute, good, good)
	if b := c.breach(); b == nil || b.Promise != "dishonest" {
		t.Errorf("a long lie: %+v", b)
	}
}

func TestAnOrderPerKey(t *testing.T) {
	t.Parallel()
	o := newOrders()
	key, first, second := newKey(), newKey(), newKey()
	o.use(key)
	if b := o.answer(key, first); b != nil {
		t.Errorf("%+v", b)
	}
	if b := o.answer(key, first); b != nil {
		t.Errorf("%+v", b)
	}
	if b := o.answer(key, second); b == nil || b.Promise != "orders" {
		t.Errorf("two orders for one key: %+v", b)
	}
	e := oracle.Entry{ID: uuid.New(), Subject: first.String(), Type: "order.created"}
	if b := o.See(e); b != nil {
		t.Errorf("%+v", b)
	}
	again := e
	again.ID = uuid.New()
	if b := o.See(again); b == nil || b.Promise != "duplicated" {
		t.Errorf("two events of one order: %+v", b)
	}
	o.Unsee(e.ID)
	if b := o.See(e); b != nil {
		t.Errorf("%+v", b)
	}
	o.Forget()
	if len(o.inStream) != 0 || len(o.excused) != 0 {
		t.Errorf("%v %v", o.inStream, o.excused)
	}
}

// The report is whole without a single sample, and says how to repeat the campaign.
func TestTheReport(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := &campaign{
		options: Options{Seed: 9, Duration: time.Minute, Faults: "all", Relays: 2, Rate: 300},
		pass:    w.pass, truth: w.truth, orders: newOrders(),
	}
	c.honesty = &honesty{c: c}
	r := newReport(c, time.Now())
	r.finish(c, false)
	for _, text := range []string{r.page(), r.chart()} {
		if text == "" || strings.Contains(text, "NaN") || strings.Contains(text, "%!") {
			t.Errorf("%q", text)
		}
	}
	f := faults[0]
	at := time.Now()
	r.Rounds = append(r.Rounds, &round{
		Number: 1, Mode: "auto", At: at, Healed: at.Add(time.Second), Recovered: at.Add(3 * time.Second),
		Faults: []*shot{{Fault: f.name, fault: f}},
	})
	for i := range 1200 {
		r.Samples = append(r.Samples, sample{At: float64(i), Committed: i * 300, Seen: i * 300, Oldest: 0.5})
	}
	c.broke(&oracle.Breach{Promise: "lost", What: "an event is <gone>"})
	r.finish(c, false)
	page := r.page()
	for _, want := range []string{"posthaste prove --seed=9 --duration=1m0s", "Broken: lost", "| `" + f.name + "` |"} {
		testenv.Contains(t, "the page", page, want)
	}
	if k := r.Kinds; len(k) != 1 || k[0].Median < 1.9 || k[0].Worst > 2.1 || k[0].Alone != 1 {
		t.Errorf("%+v", k)
	}
	if chart := r.chart(); strings.Contains(chart, "NaN") || strings.Count(chart, "<polyline") != 3 {
		t.Error(chart)
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
}

// Half of the troubled links are a relay's, whoever else there is.
func TestLinksAreChosen(t *testing.T) {
	t.Parallel()
	names := []string{
		"consumer-0 to redis", "relay-0 to postgres", "relay-0 to redis", "serve-0 to redis", "writers to postgres",
	}
	count := map[string]int{}
	r := rand.New(rand.NewPCG(1, 1))
	for range 4000 {
		who, _, _ := strings.Cut(chooseLink(slices.Clone(names), r), "-")
		count[who]++
	}
	if count["relay"] < 2000 || count["consumer"] == 0 || count["serve"] == 0 || count["writers to postgres"] < 900 {
		t.Errorf("%v", count)
	}
}

func TestAClientGivesUpAtTheEnd(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s := newShop(newOrders(), []*process{{http: "127.0.0.1:1"}}, nil)
	if status, _ := s.insist(ctx, oracle.Random(1, 1), "/orders", newKey(), "", 201); status != 0 {
		t.Errorf("status %d of nobody", status)
	}
}
