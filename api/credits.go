package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/google/uuid"

	"posthaste/credits"
	"posthaste/idem"
)

// Routes of credits. The parameter is the user's id.
const (
	routeAdd     = "/add/:id"
	routeDeduct  = "/deduct/:id"
	routeBalance = "/balance/:id"
)

// Problems of the credit routes only.
var (
	kindInsufficient   = kind{402, "insufficient_credits", "The balance does not suffice", false}
	kindForbidden      = kind{403, "forbidden", "Only an API key for any user may add credits", false}
	kindUnknownUser    = kind{404, "unknown_user", "The user has no credit account", false}
	kindFrozen         = kind{423, "account_frozen", "The account is frozen until an operator has examined it", false}
	kindOverflow       = kind{422, "balance_overflow", "The balance would become too large", false}
	kindBackpressure   = kind{429, "backpressure", "Too many operations wait for the ledger", true}
	kindNoCredits      = kind{503, "credits_store_unavailable", "The store of balances cannot be used", true}
	kindForeignCredits = kind{
		503, "credits_foreign", "The balances belong to another database until an operator has decided", false,
	}
	kindRecovering = kind{503, "epoch_recovering", "The balances are being rebuilt from the ledger", true}
)

func (s *Server) addCreditRoutes(g *gin.RouterGroup) {
	g.POST(routeAdd, handle(func(c *gin.Context) *problem { return s.postCredits(c, routeAdd, credits.Add) }))
	g.POST(routeDeduct, handle(func(c *gin.Context) *problem { return s.postCredits(c, routeDeduct, credits.Deduct) }))
	g.GET(routeBalance, handle(s.getBalance))
}

// creditUser returns the user in the path. An invalid id has no account.
func creditUser(c *gin.Context) (uuid.UUID, *problem) {
	user, ok := uuidOf(c.Param("id"))
	if !ok || user == uuid.Nil {
		return user, &problem{kind: kindUnknownUser}
	}
	if !exchangeOf(c).who.may(user) {
		return user, &problem{kind: kindForbiddenUser}
	}
	return user, nil
}

// postCredits serves POST /add/{userId} and POST /deduct/{userId}.
func (s *Server) postCredits(c *gin.Context, route string, k credits.Kind) *problem {
	op, prob := readCredits(c, route, k)
	if prob != nil {
		return prob
	}
	if s.o.Credits == nil {
		return &problem{kind: kindNoCredits, retryAfter: time.Second}
	}
	// A client that disconnects does not interrupt the operation.
	res, err := s.o.Credits.Apply(context.WithoutCancel(c.Request.Context()), *op)
	if err != nil {
		return s.creditProblem(c, err)
	}
	writeCredits(c, &res)
	return nil
}

// readCredits reads and checks the request.
func readCredits(c *gin.Context, route string, k credits.Kind) (*credits.Op, *problem) {
	user, prob := creditUser(c)
	if prob != nil {
		return nil, prob
	}
	key, body, prob := readGuarded(c)
	if prob != nil {
		return nil, prob
	}
	op, prob := decodeCredits(body)
	if prob != nil {
		return nil, prob
	}
	op.User, op.Kind = user, k
	op.ID = credits.OpID(idem.NewKey("", user.String(), http.MethodPost, route, key))
	op.Fingerprint = idem.NewFingerprint(fingerprintVersion, "credits", user.String(), string(k),
		strconv.FormatInt(op.Amount, 10), op.Reference)
	op.MintedAt = mintedAt(key)
	return op, nil
}

// decodeCredits reads the body: an amount and an optional reference.
func decodeCredits(body []byte) (*credits.Op, *problem) {
	m, prob := decodeObject(body)
	if prob != nil {
		return nil, prob
	}
	op := &credits.Op{}
	f := fields{unread: m}
	f.take("amount", true, "must be an integer from 1 to 999999999999", func(raw json.RawMessage) (ok bool) {
		op.Amount, ok = amountOf(raw, credits.MaxAmount)
		return ok
	})
	f.take("reference", false, "must be a string of at most 255 bytes without zero bytes",
		func(raw json.RawMessage) bool {
			return raw[0] == '"' && json.Unmarshal(raw, &op.Reference) == nil &&
				len(op.Reference) <= credits.MaxReference && !strings.ContainsRune(op.Reference, 0)
		})
	if prob := f.problem(); prob != nil {
		return nil, prob
	}
	return op, nil
}

// writeCredits sends the result of an operation: an identical body for every attempt, and this attempt's headers.
func writeCredits(c *gin.Context, r *credits.Result) {
	markReplay(c, r.Replayed, r.At, credits.OutcomeTTL)
	if r.Outcome == credits.OK {
		write(c, http.StatusOK, jsonType, r.Body())
		return
	}
	p := refusal(r)
	writeRefusal(c, p.Status, marshal(p))
}

// creditRefusal is a problem with the balance. It names the operation and not the request, so that every retry gets the
// same bytes.
type creditRefusal struct {
	problemBody
	Balance  int64 `json:"balance"`
	Required int64 `json:"required"`
}

func refusal(r *credits.Result) creditRefusal {
	p := problem{kind: kindInsufficient}
	if r.Outcome == credits.Overflow {
		p.kind = kindOverflow
	}
	return creditRefusal{p.body("urn:uuid:" + r.OpID.String()), r.Balance, r.Amount}
}

// creditProblem maps the bank's errors to problems.
func (s *Server) creditProblem(c *gin.Context, err error) *problem {
	switch {
	case errors.Is(err, credits.ErrUnknown):
		s.log.Warn("outcome of a credit operation is unknown", "request_id", exchangeOf(c).id, "err", err)
		return &problem{kind: kindUnknown, retryAfter: time.Second}
	case errors.Is(err, credits.ErrUnknownUser):
		return &problem{kind: kindUnknownUser}
	case errors.Is(err, credits.ErrReused):
		return &problem{kind: kindKeyReused}
	case errors.Is(err, credits.ErrExpired):
		return &problem{kind: kindKeyExpired}
	case errors.Is(err, credits.ErrFrozen):
		return &problem{kind: kindFrozen}
	case errors.Is(err, credits.ErrBackpressure):
		return &problem{kind: kindBackpressure, retryAfter: time.Second}
	case errors.Is(err, credits.ErrForeign):
		return &problem{kind: kindForeignCredits}
	case errors.Is(err, credits.ErrRecovering):
		return &problem{kind: kindRecovering, retryAfter: time.Second}
	default:
		s.log.Warn("credits cannot be served now", "request_id", exchangeOf(c).id, "err", err)
		return &problem{kind: kindNoCredits, retryAfter: time.Second}
	}
}

// balanceBody is the body of GET /balance.
type balanceBody struct {
	Balance   int64  `json:"balance"`
	Seq       int64  `json:"seq"`
	SyncedSeq int64  `json:"synced_seq"`
	Source    string `json:"source"`
	AsOf      string `json:"as_of"`
}

// getBalance serves GET /balance/{userId}. With consistency=durable it reads the ledger, which works without Redis.
func (s *Server) getBalance(c *gin.Context) *problem {
	user, prob := creditUser(c)
	if prob != nil {
		return prob
	}
	if s.o.Credits == nil {
		return &problem{kind: kindNoCredits, retryAfter: time.Second}
	}
	read := s.o.Credits.Balance
	if v, ok := c.Request.URL.Query()["consistency"]; ok {
		if len(v) != 1 || (v[0] != "durable" && v[0] != "cached") {
			return &problem{kind: kindParameter, detail: "consistency must be cached or durable"}
		}
		if v[0] == "durable" {
			read = s.o.Credits.DurableBalance
		}
	}
	b, err := read(c.Request.Context(), user)
	if err != nil {
		return s.creditProblem(c, err)
	}
	c.Header("Cache-Control", "no-store")
	write(c, http.StatusOK, jsonType, marshal(balanceBody{
		b.Balance, b.Seq, b.SyncedSeq, b.Source, b.AsOf.UTC().Format(timeLayout),
	}))
	return nil
}
