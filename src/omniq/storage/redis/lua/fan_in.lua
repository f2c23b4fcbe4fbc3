--[[
Fan-in: members of a key are counted once each.

  {cc:<key>}:count   string  how many are missing; shared with every client of the contract
  {cc:<key>}:done    set     who was counted; both are deleted with the last one
  {cc:<key>}:o       hash    ours: expected, expires_ms, and "m:<member>" with what that member heard. It outlives the count, so
                             that a member that asks again, the last one too, hears the same.
]]

local FAN_IN_MS = 86400000 -- how long we remember one that another client opened

local function fan_in(key)
  local base = '{cc:' .. key .. '}:'
  local found = call('HMGET', base .. 'o', 'expected', 'expires_ms')
  local f = {count = base .. 'count', done = base .. 'done', o = base .. 'o', expected = found[1] and number(found[1])}
  if f.expected and number(found[2]) <= now then
    call('DEL', f.count, f.done, f.o)
    f.expected = nil
  end
  f.left = call('GET', f.count)
  f.left = f.left and number(f.left)
  if f.left and not f.expected then f.expected = f.left + call('SCARD', f.done) end
  return f
end

local function remember(f, ttl_ms, ...)
  call('HSET', f.o, 'expected', f.expected, ...)
  call('HSETNX', f.o, 'expires_ms', digits(now + ttl_ms))
  if call('PTTL', f.o) < 0 then call('PEXPIRE', f.o, digits(ttl_ms + GRACE_MS)) end
end

function alone.openfanin(op)
  local f = fan_in(op.key)
  if f.expected and f.expected ~= op.expected then return nil, 'IdempotencyConflict', f.expected end
  if f.expected then return {f.left or 0} end
  f.expected = op.expected
  call('DEL', f.done)
  call('SET', f.count, op.expected, 'PX', digits(op.ttl + GRACE_MS))
  remember(f, op.ttl)
  return {op.expected}
end

function alone.countfanin(op)
  local f = fan_in(op.key)
  local heard = call('HGET', f.o, 'm:' .. op.member)
  if heard then return {number(heard)} end
  if not f.left then return {-1} end
  if call('SADD', f.done, op.member) == 0 then return {f.left} end -- another client counted it
  local left = math.max(f.left - 1, 0)
  if left > 0 then
    call('DECR', f.count)
    local ttl = call('PTTL', f.count)
    if ttl > 0 then call('PEXPIRE', f.done, ttl) end
  else
    call('DEL', f.count, f.done)
  end
  remember(f, FAN_IN_MS, 'm:' .. op.member, left)
  return {left}
end
