package audit

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"strings"
)

// call is a request that may change something.
type call struct {
	trail  *Trail
	who    Who
	action string
	// reason is why it was refused; done reports whether Do was called.
	reason string
	done   bool
}

type callKey struct{}

// Serve lets next answer a request that may change something. The handler makes the change with Do. A request that
// does not reach Do is recorded as refused.
func (t *Trail) Serve(w http.ResponseWriter, r *http.Request, next http.Handler, who Who, action string, args Detail) {
	c := &call{trail: t, who: who, action: action}
	answer := &answering{ResponseWriter: w, status: http.StatusOK}
	next.ServeHTTP(answer, r.WithContext(context.WithValue(r.Context(), callKey{}, c)))
	switch {
	case c.done:
	case answer.status < http.StatusBadRequest:
		t.log.Error("a change was made without an entry", "action", action)
	default:
		t.Refuse(r.Context(), who, action, cmp.Or(c.reason, strings.ToLower(http.StatusText(answer.status))), args)
	}
}

// Do is Trail.Do for the request of ctx. It returns ErrNoEntry for a request that did not come through Serve.
func Do(ctx context.Context, args Detail, change func(ctx context.Context) (Detail, error)) error {
	c, found := ctx.Value(callKey{}).(*call)
	if !found {
		return errors.Join(ErrNoEntry, errors.New("the request is not known as a change"))
	}
	c.done = true
	return c.trail.Do(ctx, c.who, c.action, args, change)
}

// Because sets the reason of a refusal, if its status does not give it.
func Because(r *http.Request, reason string) {
	if c, found := r.Context().Value(callKey{}).(*call); found {
		c.reason = reason
	}
}

// answering records the status.
type answering struct {
	http.ResponseWriter

	status int
}

func (a *answering) WriteHeader(status int) {
	a.status = status
	a.ResponseWriter.WriteHeader(status)
}
