package console

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/google/uuid"

	"posthaste/api"
	"posthaste/api/admin"
	"posthaste/internal/audit"
	"posthaste/internal/ops"
	"posthaste/relay"
	"posthaste/sink"
)

// State is the page's data, except for the lists that it requests separately.
type State struct {
	Now     time.Time `json:"now"`
	Verdict ops.Page  `json:"verdict"`
	// Relay is this process' own relay, or nil.
	Relay    *Relay           `json:"relay"`
	Postgres Look[Postgres]   `json:"postgres"`
	Redis    Look[ops.Memory] `json:"redis"`
	Streams  Look[[]Stream]   `json:"streams"`
	// Groups are the groups with the worst problems; GroupSum covers all. A group on several streams of a type counts
	// once.
	Groups   Look[[]sink.Group]  `json:"groups"`
	GroupSum GroupSum            `json:"group_sum"`
	Dead     Look[ops.DeadCount] `json:"dead"`
	// Lost is when Redis was found to have lost data, if that is within the charts' time.
	Lost *time.Time `json:"lost,omitempty"`
	// Sample is the newest sample of the charts.
	Sample *Sample `json:"sample"`
	// Events are the newest events of all streams, the newest last.
	Events []Event `json:"events"`
}

// Relay is the state of this process' relay.
type Relay struct {
	Leader   bool      `json:"leader"`
	Mode     string    `json:"mode"`
	Phase    string    `json:"phase"`
	Epoch    int64     `json:"epoch"`
	Inflight int       `json:"inflight"`
	Since    time.Time `json:"since"`
	Ready    bool      `json:"ready"`
	Reasons  []string  `json:"reasons"`
	Degraded []string  `json:"degraded"`
}

type GroupSum struct {
	Groups  int   `json:"groups"`
	Unread  int64 `json:"unread"`
	Pending int64 `json:"pending"`
}

// sumUp sums up groups, sorts them by their problems, and keeps at most maxGroups of them and maxShards of their
// streams.
func sumUp(groups []sink.Group) ([]sink.Group, GroupSum) {
	sum := GroupSum{Groups: len(groups)}
	for _, g := range groups {
		sum.Unread += max(g.Lag, 0)
		sum.Pending += g.Pending
	}
	groups = slices.Clone(groups)
	slices.SortStableFunc(groups, func(a, b sink.Group) int { return cmp.Compare(trouble(b), trouble(a)) })
	groups = groups[:min(len(groups), maxGroups)]
	left := maxShards
	for i := range groups {
		groups[i].Streams = groups[i].Streams[:min(len(groups[i].Streams), left)]
		left -= len(groups[i].Streams)
	}
	return groups, sum
}

// trouble ranks a group by its worst problem; 0 is none.
func trouble(g sink.Group) int {
	switch {
	case g.Lost > 0:
		return 3
	case ops.StateOf(g) == ops.Abandoned:
		return 2
	case ops.StateOf(g) == ops.Slow:
		return 1
	}
	return 0
}

// assemble returns the state at now from what was read before. It does not block.
func (c *Console) assemble(now time.Time) State {
	events, lost := c.watch.recent()
	s := State{
		Now: now.UTC(), Postgres: c.watch.postgres.look(), Redis: c.watch.redis.look(), Streams: c.watch.feed.look(),
		Groups: c.watch.groups.look(),
		Sample: c.ring.latest(), Events: events,
	}
	if s.Streams.Value == nil {
		s.Streams.Value = []Stream{}
	}
	if s.Groups.Value == nil {
		s.Groups.Value = []sink.Group{}
	}
	dead := c.watch.dead.look()
	s.Dead = Look[ops.DeadCount]{
		dead.Answer, ops.CountDead(dead.Value.dead, dead.Value.relay, dead.Value.groupN),
	}
	var health *relay.Health
	if r := c.o.Relay; r != nil {
		st, h := r.Status(), r.Health()
		health = &h
		s.Relay = &Relay{
			Leader: st.Leader, Mode: string(st.Mode), Phase: st.Phase, Epoch: st.Epoch, Inflight: st.Inflight,
			Since: st.Since, Ready: h.Ready,
			Reasons: list(h.Reasons), Degraded: list(h.Degraded),
		}
	}
	if lost.Before(c.ring.lastGap()) {
		lost = c.ring.lastGap()
	}
	if now.Sub(lost) < ringSize*time.Second {
		s.Lost = &lost
	}
	s.Verdict = ops.Assess(c.snapshot(&s, health)).Page()
	s.Groups.Value, s.GroupSum = sumUp(s.Groups.Value)
	return s
}

// list makes a nil slice empty, which JSON encodes as [] instead of null.
func list(s []string) []string { return append([]string{}, s...) }

// snapshot returns the input of the verdict. health is that of this process' own relay.
func (c *Console) snapshot(s *State, health *relay.Health) *ops.Snapshot {
	return &ops.Snapshot{
		Now: s.Now,
		Asked: ops.Asked{
			Postgres: s.Postgres.Answer, Redis: s.Redis.Answer, Dead: s.Dead.Answer, Groups: s.Groups.Answer,
			Streams: s.Streams.Answer,
		},
		Postgres: s.Postgres.Value.Postgres, Redis: s.Redis.Value, Relay: health, WALBudget: c.o.Doctor.WALBudget,
		Dead: s.Dead.Value, Groups: s.Groups.Value, Lost: s.Lost, Streams: s.Postgres.Value.Streams, Looked: maxStreams,
		Fresh: oldAfter,
	}
}

func (c *Console) state(w http.ResponseWriter, r *http.Request) {
	c.watch.refresh(r.Context())
	admin.Answer(w, http.StatusOK, c.assemble(time.Now()))
}

func (c *Console) history(w http.ResponseWriter, _ *http.Request) {
	admin.Answer(w, http.StatusOK, map[string]any{"samples": c.ring.list()})
}

const (
	// maxDead bounds the dead events of consumer groups on the page. ops.ListDead has a bound of its own.
	maxDead = 1000
	// maxIDs bounds the dead events of one action.
	maxIDs = 200
)

func (c *Console) dead(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Has("fresh") {
		c.watch.dead.fresh(r.Context())
	} else {
		c.watch.dead.refresh(r.Context())
	}
	l := c.watch.dead.look()
	list := l.Value.dead
	if list == nil {
		list = []ops.Dead{}
	}
	admin.Answer(w, http.StatusOK, map[string]any{
		"dead": list, "total": l.Value.relay + l.Value.groupN, "as_of": l.AsOf,
		"error": l.Error,
	})
}

// result is the outcome for one event.
type result struct {
	What  string `json:"what"`
	Error string `json:"error,omitempty"`
}

// onDead applies an action to the named events.
func (c *Console) onDead(a ops.DeadAction) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			IDs    []uuid.UUID `json:"ids"`
			Source string      `json:"source"` // relay, or a group; empty for each that has given the event up
		}
		if !admin.Read(w, r, &body, "the body is not the JSON that this call expects") {
			return
		}
		if len(body.IDs) == 0 || len(body.IDs) > maxIDs {
			admin.Problem(w, http.StatusUnprocessableEntity, "name one to 200 event ids")
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), admin.CallTimeout)
		defer cancel()
		l, err := c.watch.readDead(ctx)
		if err != nil && !errors.As(err, new(partial)) {
			c.fail(w, err)
			return
		}
		in := ops.DeadIn{Pool: c.o.Pool, Client: c.o.Redis, Groups: l.groups, Source: body.Source}
		results := []result{}
		each := func(ctx context.Context) (audit.Detail, error) {
			var tally audit.Tally
			err = in.Each(ctx, a, body.IDs, false, func(id, source string, err error) {
				res := result{What: ops.DeadName(id, source)}
				tally.Add(res.What, err)
				if err != nil {
					res.Error = plain(err)
				}
				results = append(results, res)
			})
			became, failed := tally.Result()
			if err != nil {
				failed = err
			}
			return became, failed
		}
		if noted := audit.Do(ctx, audit.Detail{"ids": body.IDs}, each); errors.Is(noted, audit.ErrNoEntry) {
			err = noted
		}
		if err != nil {
			c.fail(w, err)
			return
		}
		c.watch.dead.fresh(ctx)
		admin.Answer(w, http.StatusOK, map[string]any{"results": results, "done": a.Done})
	}
}

// entriesShown bounds the audit entries on the page.
const entriesShown = 20

func (c *Console) audit(w http.ResponseWriter, r *http.Request) {
	list, err := c.entries.Get(r.Context())
	if err != nil {
		c.fail(w, err)
		return
	}
	admin.Answer(w, http.StatusOK, map[string]any{"entries": append([]audit.Entry{}, list...)})
}

type diagnosis struct {
	ops.Diagnosis
	AsOf time.Time `json:"as_of"`
}

// doctorTimeout bounds a diagnosis.
const doctorTimeout = 8 * time.Second

func (c *Console) diagnose(w http.ResponseWriter, r *http.Request) {
	d, err := c.doctor.Get(r.Context())
	if err != nil {
		return // the caller left
	}
	admin.Answer(w, http.StatusOK, d)
}

func (c *Console) trace(w http.ResponseWriter, r *http.Request) {
	if !c.traces.TryAcquire(1) {
		busy(w)
		return
	}
	defer c.traces.Release(1)
	id, user := r.URL.Query().Get("id"), r.URL.Query().Get("user")
	if id == "" || len(id) > 1024 {
		admin.Problem(w, http.StatusUnprocessableEntity, "the id must be at most 1024 bytes")
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), admin.CallTimeout)
	defer cancel()
	if user != "" {
		u, err := uuid.Parse(user)
		if err != nil {
			admin.Problem(w, http.StatusUnprocessableEntity, "the user must be a UUID")
			return
		}
		if id, err = ops.OrderID(ctx, c.o.Pool, u, api.OrderKey(u, id)); err != nil {
			admin.Problem(w, http.StatusNotFound, plain(err))
			return
		}
	}
	steps, err := ops.Trace(ctx, c.o.Pool, c.o.Redis, id)
	out := map[string]any{"steps": steps}
	switch {
	case errors.Is(err, ops.ErrUnknownID):
		admin.Problem(w, http.StatusNotFound, plain(err))
		return
	case err != nil && len(steps) == 0:
		c.fail(w, err)
		return
	case err != nil:
		out["error"] = plain(err)
	}
	admin.Answer(w, http.StatusOK, out)
}
