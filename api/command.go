package api

import (
	"encoding/json"
	"regexp"
	"strconv"
	"time"

	"github.com/google/uuid"

	"posthaste/credits"
	"posthaste/idem"
	"posthaste/sql"
)

// maxAmount is the largest amount of an order, in minor units.
const maxAmount = 999_999_999_999_999

// fingerprintVersion is the version of the fingerprint's encoding. Raise it when the encoding changes: rows written
// before are then compared by their columns.
const fingerprintVersion = 1

// Command is a decoded and validated order request.
type Command struct {
	UserID   uuid.UUID
	Amount   int64
	Currency string
	// PayWith is sql.PayCredits if the user's credits pay for the order, one credit per minor unit; otherwise "".
	PayWith string
}

func (c *Command) fingerprint() idem.Fingerprint {
	parts := []string{"order", c.UserID.String(), strconv.FormatInt(c.Amount, 10), c.Currency}
	if c.PayWith != "" {
		parts = append(parts, c.PayWith)
	}
	return idem.NewFingerprint(fingerprintVersion, parts...)
}

// matches reports whether this command created the stored order.
func (c *Command) matches(o *sql.Order) bool {
	fp := c.fingerprint()
	if len(o.Fingerprint) == len(fp) && o.Fingerprint[0] == fp.Version() {
		return string(o.Fingerprint) == string(fp[:])
	}
	return c.UserID == o.UserID && c.Amount == o.Amount && c.Currency == o.Currency && c.PayWith == o.PayWith
}

var (
	currencyRE = regexp.MustCompile(`^[A-Z]{3}$`)
	amountRE   = regexp.MustCompile(`^[1-9][0-9]{0,14}$`)
)

// decodeCommand reads the body of POST /orders. If the principal may act for any user, the body must name the user.
func decodeCommand(body []byte, who principal) (*Command, *problem) {
	m, prob := decodeObject(body)
	if prob != nil {
		return nil, prob
	}
	c := Command{UserID: who.user}
	f := fields{unread: m}
	f.take("user_id", who.any, "must be a UUID in its 36-character form", func(raw json.RawMessage) (ok bool) {
		var text string
		err := json.Unmarshal(raw, &text)
		c.UserID, ok = uuidOf(text)
		return err == nil && ok
	})
	f.take("amount", true, "must be an integer from 1 to 999999999999999", func(raw json.RawMessage) (ok bool) {
		c.Amount, ok = amountOf(raw, maxAmount)
		return ok
	})
	f.take("currency", true, "must be three capital letters", func(raw json.RawMessage) bool {
		return json.Unmarshal(raw, &c.Currency) == nil && currencyRE.MatchString(c.Currency)
	})
	f.take("pay_with", false, `must be "credits"`, func(raw json.RawMessage) bool {
		return json.Unmarshal(raw, &c.PayWith) == nil && c.PayWith == sql.PayCredits
	})
	if c.PayWith == sql.PayCredits && c.Amount > credits.MaxAmount {
		f.faults = append(f.faults,
			fieldError{"/amount", "must be an integer from 1 to 999999999999 when paid by credits"})
	}
	if prob := f.problem(); prob != nil {
		return nil, prob
	}
	if !who.may(c.UserID) {
		return nil, &problem{kind: kindForbiddenUser}
	}
	if c.PayWith != "" && !who.has(ScopeCredit) {
		return nil, &problem{kind: kindForbiddenScope, detail: "it lacks the scope " + string(ScopeCredit)}
	}
	return &c, nil
}

// amountOf reads an integer from 1 to most. It accepts no sign, fraction or exponent.
func amountOf(raw json.RawMessage, most int64) (int64, bool) {
	n, err := strconv.ParseInt(string(raw), 10, 64)
	if err != nil || n > most || !amountRE.Match(raw) {
		return 0, false
	}
	return n, true
}

// uuidOf accepts only the 36-character form, so that an id has one spelling; uuid.Parse accepts others too.
func uuidOf(s string) (uuid.UUID, bool) {
	if len(s) != 36 {
		return uuid.Nil, false
	}
	id, err := uuid.Parse(s)
	return id, err == nil
}

// orderBody is the response body of an order and the payload of its event.
type orderBody struct {
	ID        uuid.UUID `json:"id"`
	UserID    uuid.UUID `json:"user_id"`
	Amount    int64     `json:"amount"`
	Currency  string    `json:"currency"`
	Status    string    `json:"status"`
	CreatedAt string    `json:"created_at"`
}

// timeLayout is RFC 3339 in UTC, with six decimals.
const timeLayout = "2006-01-02T15:04:05.000000Z"

// render returns the body of an order. The bytes are always the same.
func render(o *sql.Order) []byte { return marshal(bodyOf(o)) }

func bodyOf(o *sql.Order) orderBody {
	return orderBody{o.ID, o.UserID, o.Amount, o.Currency, o.Status, o.CreatedAt.UTC().Format(timeLayout)}
}

// record is the guard's record of a finished order. With the request, whose fingerprint is equal, it suffices to render
// the response without Postgres.
func record(o *sql.Order) idem.Record {
	if o.Status == sql.OrderRejected {
		return idem.Record{Status: o.RespStatus, Ref: o.ID.String()}
	}
	return idem.Record{Status: 201, Ref: o.ID.String(), Payload: strconv.FormatInt(o.CreatedAt.UnixMicro(), 36)}
}

// restore is the inverse of record, for orders that were not rejected.
func (c *Command) restore(r idem.Record) (*sql.Order, bool) {
	id, ok := uuidOf(r.Ref)
	micros, err := strconv.ParseInt(r.Payload, 36, 64)
	if !ok || err != nil || r.Status != 201 {
		return nil, false
	}
	return &sql.Order{
		ID: id, UserID: c.UserID, Amount: c.Amount, Currency: c.Currency, Status: sql.OrderPending, PayWith: c.PayWith,
		CreatedAt: time.UnixMicro(micros).UTC(),
	}, true
}
