--[[
One new task without extras: the commonest call of all. Its values are arguments of their own (`packing.py`) instead of a packed
request. It writes the keys that `alike.enqueues` writes and ends the script here, before the functions of the other parts are
made: that takes longer than all of this. If the id is known or may be staged, or tasks have fallen due, the others do the work.

  ARGV  '' now|'' flags id payload fingerprint queue name ttl|'' options on_conflict lease, then the fields of its shape
  flags  e: write an event, c: on a cluster, a: the call may have been carried out before, n: without payload
]]

local request

if ARGV[2] then
  local call, at, flags, id, payload, fingerprint, queue, name, ttl = redis.call, unpack(ARGV, 2, 9)
  local NOW, now = at, tonumber(at)
  if at == '' then
    local time = call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
    NOW = string.format('%d', now)
  end
  local base, cluster, events = '{' .. queue .. '}:', string.find(flags, 'c', 1, true), string.find(flags, 'e', 1, true)
  local keys = {base .. 'job:' .. id, base .. 'o:end:' .. id, base .. 'o:staged'}
  local others = cluster and {} or call('SMEMBERS', '{omniq.store}:queues')
  local few = #others <= 1300 -- as many keys as one command takes
  if few then
    for _, other in ipairs(others) do
      if other ~= queue then
        local n = #keys
        keys[n + 1], keys[n + 2] = '{' .. other .. '}:job:' .. id, '{' .. other .. '}:o:end:' .. id
        keys[n + 3] = '{' .. other .. '}:o:staged'
      end
    end
  end
  if few and call('EXISTS', unpack(keys)) == 0 and call('ZCOUNT', base .. 'delayed', '-inf', NOW) == 0 then
    local found = call('HMGET', base .. 'o:meta', 'seq', 'events')
    local seq = string.format('%d', math.max((tonumber(found[1]) or 0) + 1, now * 2048))
    local origin = NOW .. ' ' .. seq .. ' ' .. (ttl ~= '' and ttl or '-') .. ' ' .. #name .. ' ' .. #fingerprint .. ' ' .. name
      .. fingerprint .. ARGV[10]
    -- `store.new_fields` written out: to make it, and a table, would cost a twentieth of all this
    call('HSET', keys[1], 'id', id, 'payload', payload, 'o', origin, 'state', 'wait', 'attempt', '0', 'created_ms', NOW,
         'queued_ms', NOW, 'updated_ms', NOW, 'first_started_ms', '', 'last_started_ms', '', 'completed_ms', '', 'failed_ms', '',
         unpack(ARGV, 13))
    local waiting = call('RPUSH', base .. 'wait', id)
    call('ZADD', base .. 'idx:wait', NOW, id)
    call('ZADD', base .. 'o:tasks', seq, id)
    if events then
      local number = string.format('%d', (tonumber(found[2]) or 0) + 1)
      local data = '{"payload_bytes":' .. (string.find(flags, 'n', 1, true) and 0 or #payload) .. '}'
      call('XADD', base .. 'o:events', number .. '-0', 'e',
          cmsgpack.pack({now, {'enqueued', id, name, false, 0, false, now, now, 3, data}}))
      call('HSET', base .. 'o:meta', 'seq', seq, 'events', number)
    else
      call('HSET', base .. 'o:meta', 'seq', seq)
    end
    local stats = call('HMGET', base .. 'stats', 'group_waiting', 'groups_ready')
    local grouped = math.max(tonumber(stats[1]) or 0, 0)
    call('HSET', base .. 'stats', 'waiting', waiting, 'group_waiting', grouped, 'waiting_total', waiting + grouped,
        'last_activity_ms', NOW, 'last_enqueue_ms', NOW)
    if not stats[2] then -- a new queue, or one whose clients keep no counters
      call('HSET', base .. 'stats', 'active', call('ZCARD', base .. 'active'), 'delayed', call('ZCARD', base .. 'delayed'),
          'failed', call('LLEN', base .. 'failed'), 'completed_kept', call('LLEN', base .. 'completed'),
          'groups_ready', call('ZCARD', base .. 'groups:ready'))
      if not cluster then call('SADD', '{omniq.store}:queues', queue) end
    end
    call('PUBLISH', '{omniq.store}:wake', cmsgpack.pack({{queue}, {}, false}))
    return {{{1}}, {queue}, {}, now}
  end
  request = {
    others = others, now = now, events = events, cluster = cluster, again = string.find(flags, 'a', 1, true),
    transactions = {{{
      kind = 'enqueues', queue = queue, name = name, fields = {unpack(ARGV, 13)}, options = ARGV[10], lease = tonumber(ARGV[12]),
      on_conflict = ARGV[11], empty = string.find(flags, 'n', 1, true), rows = {id, payload, fingerprint}, ttl = tonumber(ttl),
    }}},
  }
end
