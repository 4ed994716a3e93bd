package ops

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/credits"
	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sql"
)

// Adoption is what a database takes over from another one that wrote to the same Redis.
type Adoption struct {
	// Streams are the streams of this database, in the order of their names.
	Streams []string
	// Balances reports whether Redis has credit balances of another database; see FindBalances.
	Balances bool

	owner outbox.Owner
	// shards is how many streams a type has.
	shards int
	// name is the source field of this database's entries; shared reports whether it shares its streams.
	name   string
	shared bool
}

// FindAdoption reads from Postgres what can be taken over. It gives a copied database a new identity.
func FindAdoption(
	ctx context.Context, pool *pgxpool.Pool, relayName string, shared bool,
) (*Adoption, error) {
	if err := sql.Register(ctx, pool, relayName); err != nil {
		return nil, err
	}
	if err := sql.Identify(ctx, pool); sql.SQLState(err) == pgerrcode.InsufficientPrivilege {
		return nil, fmt.Errorf("%w: start the relay of this database first, which prepares it, and adopt then", err)
	} else if err != nil {
		return nil, err
	}
	st, err := sql.ReadState(ctx, pool, relayName)
	if err != nil {
		return nil, err
	}
	streams, err := sql.KnownStreams(ctx, pool)
	return &Adoption{
		Streams: streams, owner: st.Owner, shards: st.Shards, name: outbox.EntrySource(relayName), shared: shared,
	}, err
}

// FindBalances checks Redis for balances of another database.
func (a *Adoption) FindBalances(ctx context.Context, client redis.UniversalClient) error {
	source, err := credits.Owner(ctx, client)
	a.Balances = source != "" && source != a.owner.Source.String()
	return err
}

// Others names the databases that TakeOver would exclude from a stream: those that share it, if this database does
// not; else the database with the same name.
func (a *Adoption) Others(ctx context.Context, client redis.UniversalClient) ([]string, error) {
	sharing, err := sink.Sharing(ctx, client, a.Streams)
	var others []string
	for _, sources := range sharing {
		for name, source := range sources {
			if source != a.owner.Source.String() && (!a.shared || name == a.name) {
				others = append(others, name)
			}
		}
	}
	return distinct(others), err
}

// TakeOver makes this database the owner of the streams' gates, and of the balances. It may be repeated.
func (a *Adoption) TakeOver(ctx context.Context, pool *pgxpool.Pool, client redis.UniversalClient) error {
	streams := make([]outbox.Stream, len(a.Streams))
	for i, name := range a.Streams {
		streams[i] = outbox.Stream{Name: name, Base: outbox.BaseName(name, a.shards)}
	}
	if err := sql.NoteTaken(ctx, pool, streams, a.owner.Epoch); err != nil { // first: a relay may read both at any time
		return err
	}
	s := sink.New(sink.Options{Client: client, Source: a.name, Shared: a.shared})
	for _, name := range a.Streams {
		err := s.TakeOver(ctx, name, a.owner)
		if errors.As(err, new(*outbox.FencedError)) {
			continue // a relay of this database has taken it over since the owner was read
		}
		if err != nil {
			return fmt.Errorf("take over stream %q: %w", name, err)
		}
	}
	if a.Balances {
		return credits.TakeOver(ctx, client, a.owner.Source.String())
	}
	return nil
}
