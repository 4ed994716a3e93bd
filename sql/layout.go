package sql

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgerrcode"

	"posthaste/outbox"
)

// layoutProbes are aggregate ids whose parts Go and the server must compute alike: one of each length that the hash
// treats differently, and some outside ASCII.
var layoutProbes = func() []string {
	const text = "0123456789abcdef-ghijklmnopqrstuvwxyz"
	probes := []string{
		"é", "straße", "größer als zwölf Zeichen", "Œuvre", "ёлка", "日本語", "🚀🚀🚀🚀",
	}
	for n := range text {
		probes = append(probes, text[:n])
	}
	return probes
}()

func (s *Store) CheckLayout(ctx context.Context, shards int) error {
	if shards > 1 {
		if err := s.checkParts(ctx); err != nil {
			return err
		}
	}
	return s.checkNames(ctx, shards)
}

// checkNames returns an error if two types would share the name of a stream.
func (s *Store) checkNames(ctx context.Context, shards int) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	type collision struct{ Base, Stream string }
	list, err := structs[collision](ctx, s.pool, "look at the names of streams", "layout_collisions", shards)
	if err != nil || len(list) == 0 {
		return err
	}
	var names []string
	for _, c := range list {
		names = append(names, fmt.Sprintf("%s would be one of those of %s", c.Stream, c.Base))
	}
	return fmt.Errorf("%w to %d: streams of two types would have the same name: %s", outbox.ErrLayout, shards,
		strings.Join(names, ", "))
}

// checkParts compares the server's parts of layoutProbes with those that Go computes.
func (s *Store) checkParts(ctx context.Context) error {
	var parts []int
	err := s.scan(ctx, "look at the parts of aggregates", "layout_parts", []any{layoutProbes}, &parts)
	if SQLState(err) == pgerrcode.UntranslatableCharacter {
		return fmt.Errorf("%w: this database is not in UTF-8", outbox.ErrLayout)
	}
	if err != nil {
		return err
	}
	for i, p := range layoutProbes {
		if outbox.PartOf(p) != parts[i] {
			return fmt.Errorf("%w: this server puts aggregates into other parts: it is not in UTF-8, or not "+
				"little-endian", outbox.ErrLayout)
		}
	}
	return nil
}

// errUnsettled means that not all parts have the same mark.
var errUnsettled = errors.New("the parts of the table are not settled alike")

func (s *Store) ChangeLayout(ctx context.Context, o outbox.Owner, to outbox.Layout) error {
	// A publish since CheckLayout may have been the first of a type.
	if err := s.checkNames(ctx, to.Shards); err != nil {
		return err
	}
	const what = "change how streams are named"
	var changed, standby bool
	err := s.owned(ctx, what, "layout_change", []any{s.name, o.Epoch, o.Nonce[:], to.Prefix, to.Shards}, &changed,
		&standby)
	if err == nil && !changed {
		err = fmt.Errorf("%s: %w", what, errUnsettled)
	}
	if err != nil {
		return err
	}
	return s.replicated(ctx, what, standby)
}

func (s *Store) FirstLayout(ctx context.Context, o outbox.Owner, prefix string) (done bool, err error) {
	err = s.owned(ctx, "name streams before the first event", "layout_first",
		[]any{s.name, o.Epoch, o.Nonce[:], prefix}, &done)
	return done && err == nil, err
}

func (s *Store) AwaitLayout(ctx context.Context) error {
	const what = "wait until a standby knows how many streams a type has"
	var standby bool
	if err := s.scan(ctx, what, "layout_awaited", nil, &standby); err != nil {
		return err
	}
	return s.replicated(ctx, what, standby)
}

// ListStreams lists every stream ever published to, grouped by type: first the stream that a type has if it has only
// one, then the numbered ones.
func ListStreams(ctx context.Context, db DB) ([]outbox.Stream, error) {
	list, err := structs[outbox.Stream](ctx, db, "list streams", "stream_list")
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(list, func(a, b outbox.Stream) int {
		return cmp.Or(strings.Compare(a.Base, b.Base), len(a.Name)-len(b.Name), strings.Compare(a.Name, b.Name))
	})
	return list, nil
}
