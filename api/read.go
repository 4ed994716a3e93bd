package api

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/google/uuid"

	"posthaste/idem"
	"posthaste/sql"
)

// readTimeout bounds one query of a GET.
const readTimeout = 3 * time.Second

const (
	defaultLimit = 50
	maxLimit     = 200
)

// getOrder serves GET /orders/{id}. It hides other users' orders and refused orders.
func (s *Server) getOrder(c *gin.Context) *problem {
	id, ok := uuidOf(c.Param("id"))
	if !ok {
		return &problem{kind: kindNotFound}
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), readTimeout)
	defer cancel()
	o, err := sql.OrderByID(ctx, s.o.Pool, id)
	switch {
	case err != nil && !errors.Is(err, sql.ErrOrderNotFound):
		return s.unavailable(c, err)
	case err != nil || o.Status == sql.OrderRejected || !exchangeOf(c).who.may(o.UserID):
		return &problem{kind: kindNotFound}
	}
	writeCached(c, render(o))
	return nil
}

// orderByKey serves GET /orders/by-key: the outcome of the POST with this key.
func (s *Server) orderByKey(c *gin.Context) *problem {
	key, prob := parseKey(c.Request.Header)
	if prob != nil {
		return prob
	}
	user, prob := queryUser(c)
	if prob != nil {
		return prob
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), readTimeout)
	defer cancel()
	o, err := sql.OrderByKey(ctx, s.o.Pool, user, OrderKey(user, key))
	switch {
	case errors.Is(err, sql.ErrOrderNotFound):
		return &problem{kind: kindNotPlaced}
	case err != nil:
		return s.unavailable(c, err)
	case o.Status == sql.OrderRejected:
		writeCached(c, marshal(struct { // with the problem of its POST
			orderBody
			Problem json.RawMessage `json:"problem"`
		}{bodyOf(o), o.RespBody}))
	default:
		writeCached(c, render(o))
	}
	return nil
}

// listOrders serves GET /orders: newest first, by keyset.
func (s *Server) listOrders(c *gin.Context) *problem {
	user, prob := queryUser(c)
	if prob != nil {
		return prob
	}
	limit, before, prob := page(c)
	if prob != nil {
		return prob
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), readTimeout)
	defer cancel()
	orders, err := sql.ListOrders(ctx, s.o.Pool, user, before, limit+1)
	if err != nil {
		return s.unavailable(c, err)
	}
	var out struct {
		Orders []orderBody `json:"orders"`
		Next   *string     `json:"next"`
	}
	out.Orders = make([]orderBody, 0, limit)
	if len(orders) > limit {
		orders = orders[:limit]
		last := orders[limit-1].ID
		cursor := base64.RawURLEncoding.EncodeToString(last[:])
		out.Next = &cursor
	}
	for _, o := range orders {
		out.Orders = append(out.Orders, bodyOf(o))
	}
	c.Header("Cache-Control", "no-store")
	write(c, http.StatusOK, jsonType, marshal(out))
	return nil
}

// queryUser is the user of a read: the API key's own, or the one in user_id if the key may act for any user.
func queryUser(c *gin.Context) (uuid.UUID, *problem) {
	who := exchangeOf(c).who
	values, ok := c.Request.URL.Query()["user_id"]
	if !ok && !who.any {
		return who.user, nil
	}
	if len(values) != 1 {
		return uuid.Nil, &problem{kind: kindParameter, detail: "user_id is required, once"}
	}
	user, ok := uuidOf(values[0])
	if !ok {
		return uuid.Nil, &problem{kind: kindParameter, detail: "user_id must be a UUID in its 36-character form"}
	}
	if !who.may(user) {
		return uuid.Nil, &problem{kind: kindForbiddenUser}
	}
	return user, nil
}

func page(c *gin.Context) (limit int, before uuid.UUID, prob *problem) {
	limit, before = defaultLimit, uuid.Max
	if v, ok := c.GetQuery("limit"); ok {
		n, err := strconv.ParseUint(v, 10, 16)
		if err != nil || n < 1 || n > maxLimit {
			return 0, uuid.Nil, &problem{kind: kindParameter, detail: "limit must be an integer from 1 to 200"}
		}
		limit = int(n)
	}
	if v, ok := c.GetQuery("after"); ok {
		b, err := base64.RawURLEncoding.DecodeString(v)
		if err != nil || len(b) != len(before) {
			return 0, uuid.Nil, &problem{kind: kindParameter, detail: "after must be a cursor from an earlier page"}
		}
		copy(before[:], b)
	}
	return limit, before, nil
}

// writeCached answers a read with an ETag, or with 304 if the client has these bytes.
func writeCached(c *gin.Context, body []byte) {
	h := c.Writer.Header()
	tag := etag(body)
	h.Set("ETag", tag)
	h.Set("Cache-Control", "private, no-cache")
	if noneMatch(c.Request.Header.Values("If-None-Match"), tag) {
		c.Status(http.StatusNotModified)
		c.Writer.WriteHeaderNow()
		exchangeOf(c).end = time.Now()
		return
	}
	write(c, http.StatusOK, jsonType, body)
}

// noneMatch is the weak comparison of RFC 9110 13.1.2.
func noneMatch(lines []string, tag string) bool {
	for v := range strings.SplitSeq(strings.Join(lines, ","), ",") {
		v = strings.TrimSpace(v)
		if v == "*" || strings.TrimPrefix(v, "W/") == tag {
			return true
		}
	}
	return false
}

// wellKnown serves the rules for idempotency keys. Times are in seconds.
func (s *Server) wellKnown(c *gin.Context) {
	c.Header("Cache-Control", "public, max-age=3600")
	write(c, http.StatusOK, jsonType, marshal(map[string]any{
		"ttl":          int64(idem.TTL / time.Second),
		"min_length":   idem.MinKeyLength,
		"max_length":   idem.MaxKeyLength,
		"wait_default": int64(idem.DefaultWait / time.Second),
		"wait_max":     int64(idem.MaxWait / time.Second),
		"key_max_age":  int64(s.o.KeyMaxAge / time.Second),
		"routes":       []string{"POST /orders", "POST /add/{userId}", "POST /deduct/{userId}"},
	}))
}
