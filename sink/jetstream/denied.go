package jetstream

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"

	"github.com/nats-io/nats.go"

	"posthaste/outbox"
)

// DeniedError means that the server does not allow the user to publish or to subscribe to a subject.
type DeniedError struct {
	// Action is publish or subscribe, and Grant the subjects for which the user needs that right.
	Action, Subject, Grant string
}

func (e *DeniedError) Error() string {
	return fmt.Sprintf("the user of NATS has no permission to %s to %q%sgrant it %s on %q",
		e.Action, e.Subject, outbox.RemedyMark, e.Action, e.Grant)
}

// Unwrap makes the error one of the client's.
func (*DeniedError) Unwrap() error { return nats.ErrPermissionViolation }

var violation = regexp.MustCompile(`Violation for (Publish|Subscription) to "([^"]+)"`)

// denials passes what the server denies to the requests that wait for an answer. The server reports it on the
// connection and does not answer the request.
type denials struct {
	// api is what subjects of the API begin with. A server that has the domain replaces it by apiRoot, and then checks
	// the rights.
	api string

	mu      sync.Mutex
	waiting map[*wait]struct{}
	// unheard are messages for which no request waited, by their subject without its last token.
	unheard map[string]*DeniedError
}

// wait is a request.
type wait struct {
	subject string
	refuse  context.CancelCauseFunc
}

// heard handles an error that the server has reported.
func (d *denials) heard(nc *nats.Conn, _ *nats.Subscription, err error) {
	found := violation.FindStringSubmatch(err.Error())
	if !errors.Is(err, nats.ErrPermissionViolation) || found == nil {
		return
	}
	e := &DeniedError{Action: "publish", Subject: found[2]}
	first, _, _ := strings.Cut(e.Subject, ".")
	e.Grant = first + ".>"
	if api, _, ok := strings.Cut(e.Subject, ".API."); ok && first == "$JS" {
		e.Grant = api + ".API.>"
	}
	all := found[1] == "Subscription" // to the answers
	if all {
		e.Action = "subscribe"
		defer nc.Close() // the client does not subscribe again
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	heard := false
	for w := range d.waiting {
		if all || w.subject == e.Subject || strings.Replace(w.subject, d.api, apiRoot, 1) == e.Subject {
			w.refuse(e)
			heard = true
		}
	}
	if !heard {
		d.unheard[parent(e.Subject)] = e
	}
}

func parent(subject string) string { return subject[:strings.LastIndexByte(subject, '.')+1] }

// waits returns a context that ends with the denial of subject, and a function that ends the wait.
func (d *denials) waits(ctx context.Context, subject string) (context.Context, func()) {
	ctx, refuse := context.WithCancelCause(ctx)
	w := &wait{subject, refuse}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.waiting[w] = struct{}{}
	return ctx, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.waiting, w)
		refuse(nil)
	}
}

// take returns the denial of a message on a subject that begins with parent; nil without one.
func (d *denials) take(parent string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if e := d.unheard[parent]; e != nil {
		delete(d.unheard, parent)
		return e
	}
	return nil
}
